"""The task `modules`: which of ten modules of the standard library a paragraph documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.adapters.adapter_task_cases import Case, Paragraph

MODULES = (
    "asyncio",
    "decimal",
    "email",
    "http",
    "importlib",
    "logging",
    "tkinter",
    "turtle",
    "unittest",
    "xml",
)
# Further names by which a module speaks of itself.
_ALIASES = {"tkinter": ("tk", "tcl"), "asyncio": ("async",), "xml": ("sax", "dom")}
MASK = "___"
_QUESTION = (
    "Which module of Python's standard library is this paragraph from? Answer with one of: "
    f"{', '.join(MODULES)}.\n\n"
)


def masked(paragraph: Paragraph) -> str:
    """The paragraph without its module's name and aliases, also within longer names."""
    names = (paragraph.module, *_ALIASES.get(paragraph.module, ()))
    return re.sub("|".join(map(re.escape, names)), MASK, paragraph.text, flags=re.IGNORECASE)


def module_cases(paragraphs: Sequence[Paragraph]) -> list[Case]:
    """A case for each paragraph of the ten modules. The group is the object that it documents.

    A class's own paragraphs and those of its methods are one group, because they repeat each other.
    """
    return [
        Case(_QUESTION + masked(p), p.module, group=p.owner, label=p.module)
        for p in paragraphs
        if p.module in MODULES
    ]
