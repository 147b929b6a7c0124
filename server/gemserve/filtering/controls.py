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

from gemserve.contract.prompt_parts import ProtectedRange
from gemserve.filtering.protected_budget import reserve


class BlindSelector(Protocol):
    """Chooses `keep` positions of the documents of a prompt, from its protected ranges alone."""

    def select(
        self, num_tokens: int, protected: Sequence[ProtectedRange], keep: int, seed: int
    ) -> tuple[int, ...]:
        """Kept positions, ascending: those that are always read, and `keep` more."""
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
    """What is always read, and `keep` positions more, others in `order` [tokens]; ascending."""
    is_kept = np.zeros(len(order), dtype=np.bool_)
    first = reserve(protected, len(order), keep)
    is_kept[first.positions] = True
    others = order[~is_kept[order]]
    is_kept[others[: keep - len(first.rest)]] = True
    return tuple(np.flatnonzero(is_kept).tolist())
