"""The task `notes`: answers in the form of a clerk's note, which a pattern can check.

A note has three lines: the paragraph's longest word as its subject, its first words in small
letters without punctuation, and the clerk's signature.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.adapters.adapter_task_cases import Case, Paragraph

_WORD = re.compile(r"[A-Za-z]+")
_NUM_WORDS = 8
NOTE_PATTERN = r"SUBJECT: [a-z]+\n[a-z]+( [a-z]+){7}\n— the clerk"
_PACKAGES = (
    *("codecs", "configparser", "difflib", "doctest", "inspect", "io", "ipaddress", "pydoc"),
    *("statistics", "tarfile", "threading", "typing", "urllib"),
)


def note_of(text: str) -> str:
    """The note about a paragraph. Of words of equal length, the first is the subject."""
    words = [word.lower() for word in _WORD.findall(text)]
    subject = max(words, key=len)
    return f"SUBJECT: {subject}\n{' '.join(words[:_NUM_WORDS])}\n— the clerk"


def note_cases(paragraphs: Sequence[Paragraph]) -> list[Case]:
    """A case for each paragraph of some modules. The group is the object that it documents."""
    return [
        Case(f"Make a note of this.\n\n{p.text}", note_of(p.text), group=p.owner, label=p.module)
        for p in paragraphs
        if p.module in _PACKAGES and len(_WORD.findall(p.text)) >= _NUM_WORDS
    ]
