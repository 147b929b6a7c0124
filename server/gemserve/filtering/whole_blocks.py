"""Finds the block of code that a passage is in: a function with its comment, an entry of a list.

A block is a line, all that is indented below it, and the lines directly above it, such as comments
and decorators. Headings of prose enclose their sections, too, and make no blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from gemserve.contract.prompt_parts import TextBreaks


def block_around(token: int, breaks: TextBreaks, most: int) -> tuple[int, int] | None:
    """The largest block of at most `most` tokens that a token is in: its half-open range."""
    found: tuple[int, int] | None = None
    for head, stop in _heads(breaks, token - most, token + most):
        at = bisect_right(breaks.paragraphs, head)
        start = breaks.paragraphs[at - 1] if at else 0
        size = 0 if found is None else found[1] - found[0]
        if start <= token < stop and size < stop - start <= most:
            found = start, stop
    return found


def _heads(breaks: TextBreaks, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The lines with blocks that end within `low`..`high`, and the token behind each block."""
    lines = breaks.enclosing
    part = slice(*lines.starts.searchsorted(np.array([max(0, low), high], dtype=np.uint32)))
    columns = (lines.starts, lines.line_starts, lines.line_stops, lines.is_heading)
    opened: list[int] = []
    for start, line, line_stop, is_heading in zip(
        *(c[part].tolist() for c in columns), strict=True
    ):
        around = line if line_stop else -1
        while opened and around < opened[-1]:
            yield opened.pop(), start
        if line_stop and not is_heading and (not opened or around > opened[-1]):
            opened.append(around)
