"""Ranges of a prompt's tokens that are to be kept, with what will stand between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class _Change:
    """What was replaced by the range with this index. `size`: what all were before."""

    index: int
    starts: list[int]
    stops: list[int]
    size: int


class KeptRanges:
    """Half-open ranges, ascending and apart, to which more can be added.

    `size`: their tokens, and those that are added between them.
    """

    def __init__(
        self,
        ranges: Iterable[tuple[int, int]] = (),
        num_between: Callable[[int, int], int] = lambda _last, _first: 0,
    ) -> None:
        """`num_between`: how many tokens stand between a range's last token and the next first."""
        self._num_between = num_between
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.size = 0
        for start, stop in ranges:
            self._add(start, stop)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    def is_kept(self, num_tokens: int) -> npt.NDArray[np.bool_]:
        """Which tokens are kept: [tokens]."""
        edges = np.zeros(num_tokens + 1, dtype=np.int64)
        edges[self._starts] += 1
        edges[self._stops] -= 1
        return edges[:-1].cumsum() > 0

    def add_within(self, most: int, ranges: Sequence[tuple[int, int]]) -> bool:
        """Keep these, too, if `size` is `most` at most then. Returns whether it is."""
        changes = [self._add(start, stop) for start, stop in ranges]
        if self.size <= most:
            return True
        for change in reversed(changes):
            self._starts[change.index : change.index + 1] = change.starts
            self._stops[change.index : change.index + 1] = change.stops
            self.size = change.size
        return False

    def _add(self, start: int, stop: int) -> _Change:
        """Keep start..stop−1, too; what touches becomes one range."""
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        change = _Change(low, self._starts[low:high], self._stops[low:high], self.size)
        self.size -= self._size_of(low, high)
        self._starts[low:high] = [min([start, *change.starts])]
        self._stops[low:high] = [max([stop, *change.stops])]
        self.size += self._size_of(low, low + 1)
        return change

    def _size_of(self, low: int, high: int) -> int:
        """Tokens of the ranges low..high−1, and of the gaps that these have on either side."""
        tokens = sum(self._stops[low:high]) - sum(self._starts[low:high])
        beside = range(max(1, low), min(high + 1, len(self._starts)))
        return tokens + sum(
            self._num_between(self._stops[i - 1] - 1, self._starts[i]) for i in beside
        )
