"""Divides a budget among the protected ranges of a prompt, kept whatever the scores are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemserve.types import Priority, ProtectedRange


@dataclass(frozen=True, slots=True)
class ReservedPositions:
    """Positions kept before any is chosen, most important first.

    `firm`: the question, system messages, tools and the template. `rest`: other protected
    positions.
    """

    firm: list[int]
    rest: list[int]

    @property
    def positions(self) -> list[int]:
        return [*self.firm, *self.rest]


def reserve(
    protected: Sequence[ProtectedRange], num_tokens: int, budget: int, low: int
) -> ReservedPositions:
    """The positions that a filter of `low` to `budget` tokens keeps before it chooses any.

    The question comes first. Then come system messages, tools and the template, up to three
    quarters of the budget, then the rest, up to a quarter of `low`. So a filter always has tokens
    to choose.
    """
    chosen: list[int] = []
    sizes: list[int] = []
    limits = (
        (Priority.QUESTION, budget),
        (Priority.FRAME, int(0.75 * budget)),
        (Priority.TAIL, int(0.25 * low)),
    )
    for last, limit in limits:
        allowed = [r for r in protected if r.priority <= last]
        chosen = protected_positions(allowed, num_tokens, max(len(chosen), limit))
        sizes.append(len(chosen))
    return ReservedPositions(chosen[: sizes[1]], chosen[sizes[1] :])


def protected_positions(
    protected: Sequence[ProtectedRange], num_tokens: int, budget: int
) -> list[int]:
    """Positions to keep, at most `budget`, most important first.

    The end of a range is its most important place; in a `HEAD` it is the start.
    """
    chosen: dict[int, None] = {}
    for protected_range in sorted(protected, key=lambda r: (r.priority, -r.start)):
        positions = range(max(0, protected_range.start), min(protected_range.stop, num_tokens))
        for position in (
            positions if protected_range.priority is Priority.HEAD else reversed(positions)
        ):
            if len(chosen) == budget:
                return list(chosen)
            chosen.setdefault(position)
    return list(chosen)
