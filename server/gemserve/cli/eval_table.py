"""What `gemserve eval` prints of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a command that runs no model loads no torch
    from gemserve.evaluation.score import Row

_HEADS = ("subtask", "tokens", "n", "method", "kept", "score", "recall")
_TEXTS = ("subtask", "method")


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for reading: methods below each other, what they share said once.

    Without the recall, if no row has one.
    """
    lines: list[tuple[str, ...]] = []
    above: tuple[str, ...] = ()
    for row in rows:
        shared = (row.subtask, str(row.prompt_tokens), str(row.n))
        recall = "" if row.recall is None else f"{row.recall:.2f}"
        own = (row.method, f"{row.kept_tokens:.0f}", f"{row.score:.2f}", recall)
        lines.append(("", "", "", *own) if shared == above else (*shared, *own))
        above = shared
    columns = [
        _aligned(head, cells)
        for head, cells in zip(_HEADS, zip(*lines, strict=True), strict=True)
        if any(cells)
    ]
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _aligned(head: str, cells: Sequence[str]) -> list[str]:
    width = max(len(cell) for cell in (head, *cells))
    side = "<" if head in _TEXTS else ">"
    return [f"{cell:{side}{width}}" for cell in (head, *cells)]
