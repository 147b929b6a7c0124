"""Two controls that choose tokens without running the model: `position` and `random`.

Both keep the protected ranges, as sieve does. What another method gains over them, it gains by
looking at the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

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
        ends = sorted(range(num_tokens), key=lambda p: min(p, num_tokens - 1 - p))
        return _filled(reserve(protected, num_tokens, keep, keep).positions, ends, keep)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Keeps random tokens, all equally likely. The same seed gives the same tokens."""

    def select(
        self, num_tokens: int, protected: Sequence[ProtectedRange], keep: int, seed: int
    ) -> tuple[int, ...]:
        order = Random(f"{seed} {num_tokens}").sample(range(num_tokens), num_tokens)
        return _filled(reserve(protected, num_tokens, keep, keep).positions, order, keep)


def _filled(first: Sequence[int], order: Sequence[int], keep: int) -> tuple[int, ...]:
    """`first`, then other positions from `order`, `keep` in all."""
    chosen = dict.fromkeys(first)
    for position in order:
        if len(chosen) == keep:
            break
        chosen.setdefault(position)
    return tuple(sorted(chosen))
