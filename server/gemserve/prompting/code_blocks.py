"""Finds fenced code. A filter should keep or drop whole lines of it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

_FENCE = re.compile(r"[ \t]*(?:(```+)[^`\r\n]*$|(~~~+))", re.MULTILINE)


def find_code_blocks(
    texts: Sequence[tuple[int, str]], encoding: Any
) -> tuple[tuple[int, ...], ...]:
    """For each block fenced by ``` or ~~~: the first token of each line, and the block's end.

    `texts`: parts of the encoded text, each with the offset of its first character. A fence that
    is not closed goes on to the end of its part.
    """
    blocks = [block for at, text in texts for block in _code_lines(at, text)]
    if not blocks:
        return ()
    starts = [low for low, _ in encoding.offsets]
    return tuple(
        tuple(sorted({bisect_left(starts, character) for character in block})) for block in blocks
    )


def _code_lines(at: int, text: str) -> list[list[int]]:
    """The characters at which lines of code start and blocks end; `text` starts at `at`."""
    blocks: list[list[int]] = []
    if "```" not in text and "~~~" not in text:
        return blocks
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        is_closing = bool(fence) and line.strip() == fence[0] * max(len(fence), len(line.strip()))
        if mark and not fence:
            fence = mark[1] or mark[2]
            blocks.append([])
        if fence:
            blocks[-1].append(at)
        at += len(line)
        if is_closing:
            blocks[-1].append(at)
            fence = ""
    if fence:
        blocks[-1].append(at)
    return blocks


def closed_blocks(text: str) -> list[tuple[int, int]]:
    """The character ranges of fenced blocks that a fence closes, fences included."""
    return [
        (block[0], block[-1])
        for block in _code_lines(0, text)
        if len(block) > 2 and set(text[block[-2] : block[-1]].strip()) in ({"`"}, {"~"})
    ]
