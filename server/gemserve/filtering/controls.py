"""Two controls that choose tokens without running the model: `position` and `random`.

Both keep the protected ranges, as sieve does. What another method gains over them, it gains by
looking at the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gemserve.filtering.protected_budget import reserve
from gemserve.types import ProtectedRange


class BlindSelector(Protocol):
    """Chooses exactly `keep` positions from the prompt's length and its protected ranges."""

    def select(
        self, num_tokens: int, protected: Sequence[ProtectedRange], keep: int, seed: int
    ) -> tuple[int, ...]:
        """Kept positions, ascending. `keep` is below `num_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class Position:
    """Keeps the first and the last tokens, half of the budget each."""

    def select(
        self, num_tokens: int, protected: Sequence[ProtectedRange], keep: int, seed: int
    ) -> tuple[int, ...]:
        ends = np.empty(num_tokens, dtype=np.int64)  # 0, the last, 1, the last but one, …
        ends[::2] = np.arange((num_tokens + 1) // 2)
        ends[1::2] = np.arange(num_tokens - 1, (num_tokens - 1) // 2, -1)
        return _filled(protected, ends, keep)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Keeps random tokens, all equally likely. The same seed gives the same tokens."""

    def select(
        self, num_tokens: int, protected: Sequence[ProtectedRange], keep: int, seed: int
    ) -> tuple[int, ...]:
        generator = np.random.default_rng((seed % (1 << 64), num_tokens))
        return _filled(protected, generator.permutation(num_tokens), keep)


def _filled(
    protected: Sequence[ProtectedRange], order: npt.NDArray[np.int64], keep: int
) -> tuple[int, ...]:
    """The protected positions, then others in `order` [tokens], `keep` in all; ascending."""
    is_kept = np.zeros(len(order), dtype=np.bool_)
    first = reserve(protected, len(order), keep, keep).positions
    is_kept[first] = True
    others = order[~is_kept[order]]
    is_kept[others[: keep - len(first)]] = True
    return tuple(np.flatnonzero(is_kept).tolist())
