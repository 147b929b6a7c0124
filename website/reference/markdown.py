"""Pieces of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

NOTE = "<!-- made by `make docs`; change the code instead -->"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. Cells are Markdown; line ends and bars in them are escaped."""
    lines = [list(titles), ["---"] * len(titles), *[[cell(text) for text in row] for row in rows]]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(text: str) -> str:
    """In one line, with bars that end no cell."""
    line = re.sub(r"\s+", " ", text).strip()
    return code_with_bars(line.replace("|", "\\|"))


def code_with_bars(text: str) -> str:
    """Code of tables that has escaped bars, as HTML: Python's Markdown would show the backslash."""

    def as_html(found: re.Match[str]) -> str:
        shown = escape(found.group(1)).replace(r"\|", "&#124;")
        return f"<code>{shown}</code>"

    return re.sub(r"`([^`\n]*\\\|[^`\n]*)`", as_html, text)


def code(text: str) -> str:
    """`text` in backticks, as many as it needs."""
    ticks = "``" if "`" in text else "`"
    return f"{ticks}{text}{ticks}"


def prose(text: str) -> str:
    """Plain text as Markdown: names with underscores and angle brackets stay as they are."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<\\])", r"\\\1", part) for part in parts
    )
