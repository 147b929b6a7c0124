"""Prints tables as text, for the load test and the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text. The first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def cell(value: object) -> str:
    """A value as a person reads it.

    None is "–", a float has four digits, and from 1,000 on there is no fraction.
    """
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
