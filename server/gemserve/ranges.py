"""Half-open ranges of positions."""

from __future__ import annotations

from collections.abc import Sequence

Ranges = tuple[tuple[int, int], ...]  # half-open, ascending, not overlapping


def as_ranges(positions: Sequence[int]) -> Ranges:
    """Ascending positions as ranges: 3, 4, 5, 9 are (3, 6), (9, 10)."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)
