"""Turns what a reader has chosen into tokens of the prompt that another model answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemserve.contract.filter_plan import FilterPlan
from gemserve.contract.prompt_parts import StandsFor
from gemserve.contract.requests import Request
from gemserve.filtering.joined_text import Gaps, join_text
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.protected_budget import always_read, reserve
from gemserve.ranges import as_ranges


def with_choice(
    request: Request,
    plan: FilterPlan,
    best: Sequence[tuple[int, int]],
    stands_for: StandsFor,
    *,
    is_widened: bool,
) -> FilterPlan:
    """The plan that keeps what `best` stands for, and what is always read.

    `best`: ranges of the reader's prompt, the best first. They are kept as long as the budget
    lasts, which counts the prompt's own tokens. `is_widened`: then as much as fits is kept.
    """
    num_tokens, budget = len(request.prompt_ids), plan.budget
    is_document = np.ones(num_tokens, dtype=np.bool_)
    is_document[always_read(request.protected, num_tokens)] = False
    gaps = Gaps(request.breaks, is_document, request.separators)
    reserved = reserve(request.protected, num_tokens, budget.least_chosen)
    kept = KeptRanges(as_ranges(sorted(reserved.positions)), gaps.num_between)
    most = budget.limit if is_widened else max(budget.high, budget.several)
    for start, stop in best:
        low, high = stands_for.starts[start:stop], stands_for.stops[start:stop]
        is_there = high > low
        if is_there.any():
            kept.add_within(most, [(int(low[is_there].min()), int(high[is_there].max()))])
    positions = np.flatnonzero(kept.is_kept(num_tokens)).tolist()
    joined = join_text(request.tokens, positions, gaps)
    return plan.having(
        num_kept=len(joined.ids),
        chosen=tuple(positions),
        joined=tuple(joined.ids),
        added=joined.added,
    )
