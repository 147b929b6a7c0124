"""What a filter keeps of a prompt whatever the scores are.

Instructions, tools, calls, the question and the template are always read: `keep` does not count
them. What may be an instruction, such as the first and the last words of a long document, takes a
part of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemserve.contract.prompt_parts import ProtectedRange


@dataclass(frozen=True, slots=True)
class ReservedPositions:
    """Positions kept before any is chosen, most important first.

    `firm`: what is always read, outside of the budget. `rest`: other protected positions.
    """

    firm: list[int]
    rest: list[int]

    @property
    def positions(self) -> list[int]:
        return [*self.firm, *self.rest]


def reserve(protected: Sequence[ProtectedRange], num_tokens: int, budget: int) -> ReservedPositions:
    """The positions that a filter keeps before it chooses any.

    What is always read comes first. The rest takes up to a quarter of `budget`, the tokens that may
    be kept besides. So a filter always has tokens to choose.
    """
    firm = always_read(protected, num_tokens)
    everything = protected_positions(protected, num_tokens, len(firm) + int(0.25 * budget))
    return ReservedPositions(firm, everything[len(firm) :])


def always_read(protected: Sequence[ProtectedRange], num_tokens: int) -> list[int]:
    """The positions that are kept outside of the budget, most important first."""
    firm = [r for r in protected if r.is_always_read]
    return protected_positions(firm, num_tokens, num_tokens)


def count_always_read(protected: Sequence[ProtectedRange], num_tokens: int, start: int = 0) -> int:
    """How many of the positions of `always_read` are at `start` or behind it."""
    count, end = 0, start
    for each in sorted((r for r in protected if r.is_always_read), key=lambda r: r.start):
        stop = min(each.stop, num_tokens)
        count += max(0, stop - max(end, each.start))
        end = max(end, stop)
    return count


def count_first(protected: Sequence[ProtectedRange], num_tokens: int) -> int:
    """How many tokens at the beginning of a prompt are always read, without a gap."""
    end = 0
    for each in sorted((r for r in protected if r.is_always_read), key=lambda r: r.start):
        if each.start > end:
            break
        end = max(end, each.stop)
    return min(end, num_tokens)


def protected_positions(
    protected: Sequence[ProtectedRange], num_tokens: int, budget: int
) -> list[int]:
    """Positions to keep, at most `budget`, most important first.

    The end of a range is its most important place. What comes out of the budget of documents is
    kept as a whole or not at all: half a sentence says nothing.
    """
    is_new = np.ones(num_tokens, dtype=np.bool_)
    chosen: list[int] = []
    for each in sorted(protected, key=lambda r: (r.priority, -r.start)):
        if len(chosen) >= budget:
            break
        start = max(0, each.start)
        positions = start + np.flatnonzero(is_new[start : max(start, each.stop)])
        if not each.is_always_read and len(positions) > budget - len(chosen):
            continue
        is_new[start : max(start, each.stop)] = False
        positions = positions[::-1]
        chosen += positions[: budget - len(chosen)].tolist()
    return chosen
