"""Finds fenced code."""

from __future__ import annotations

import re

_FENCE = re.compile(r"[ \t]*(?:(```+)[^`\r\n]*$|(~~~+))", re.MULTILINE)


def _code_lines(text: str) -> list[list[int]]:
    """The characters at which lines of code start and blocks end."""
    at = 0
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
        for block in _code_lines(text)
        if len(block) > 2 and set(text[block[-2] : block[-1]].strip()) in ({"`"}, {"~"})
    ]
