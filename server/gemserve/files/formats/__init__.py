"""What people read in files of other formats than plain text: one module for each.

Each module has `read(content: bytes) -> str`, and runs in a process with limits on time, memory and
output (`converting`), because files may be hostile. It raises `Refused` with a reason for people;
whatever else it raises becomes one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast


class Refused(Exception):
    """There is no text, for the reason in the message, which does not name the file."""


@dataclass(frozen=True, slots=True)
class Format:
    """`needs`: packages of `gemserve[library]`. `marks`: how such content begins.

    `part`: how the name of a part of a ZIP file begins that only such files have.
    """

    suffixes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    marks: tuple[bytes, ...] = ()
    part: bytes = b""


_HTML = ("markdownify",)
# by the name of the module, which is also the kind of the file
FORMATS = {
    "csv": Format((".csv", ".tsv")),
    "docx": Format((".docx",), ("mammoth", "markdownify"), part=b"word/document"),
    "eml": Format((".eml",)),
    "epub": Format((".epub",), _HTML, part=b"META-INF/container.xml"),
    "html": Format((".html", ".htm", ".xhtml"), _HTML),
    "ipynb": Format((".ipynb",)),
    "pptx": Format((".pptx",), part=b"ppt/presentation.xml"),
    "rtf": Format((".rtf",), marks=(b"{\\rtf",)),
    "xlsx": Format((".xlsx", ".xlsm"), part=b"xl/workbook.xml"),
}
_BY_SUFFIX = {suffix: kind for kind, each in FORMATS.items() for suffix in each.suffixes}
_BY_MARK = {mark: kind for kind, each in FORMATS.items() for mark in each.marks}
_BY_PART = {each.part: kind for kind, each in FORMATS.items() if each.part}
_ZIP, _ENTRY, _ENTRY_BYTES = b"PK\3\4", b"PK\1\2", 46  # of the table at the end of a ZIP file


def find_kind(content: bytes, suffix: str) -> str | None:
    """The key of `FORMATS` for a file with this content and suffix; None if there is none."""
    for mark, kind in _BY_MARK.items():
        if content.startswith(mark):
            return kind
    if content.startswith(_ZIP):
        # a file within the file has a table, too, which comes before
        at, part = max((content.rfind(part), part) for part in _BY_PART)
        if content[max(0, at - _ENTRY_BYTES) : at].startswith(_ENTRY):
            return _BY_PART[part]
    named = _BY_SUFFIX.get(suffix.lower())
    return None if named is not None and FORMATS[named].marks else named


def read(kind: str, content: bytes) -> str:
    """Raises `Refused`, and whatever a broken file leads to."""
    module = importlib.import_module(f"{__name__}.{kind}_text")
    return cast(str, module.read(content))
