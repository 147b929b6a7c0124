"""What a filter will do to one prompt: plain frozen data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gemserve.types import FilterReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many tokens a filter keeps: `low` to `high`, or `limit` where attention is diffuse.

    Where they differ, `low` counts what is chosen, not what is protected.
    """

    low: int
    high: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterPlan:
    """How one prompt will be filtered; made by `filtering.planner` before the request is queued.

    `reason`: why the prompt is read whole, if it is. `num_kept`: tokens the answer is generated
    from; until a filter has chosen, at most, unless it finds attention diffuse. `fails_open`:
    should the filter pass fail, all of the prompt is kept.

    `layer`: where the filter pass ends; None: there is none. `rows`: positions whose queries are
    watched, in each of the layers `tapped`, of which `heads` count ((layer, head) pairs; None: all
    of the filter layer's). `coverage_bound`: below it a choice is not trusted. `repeated`: token
    ids that the filter pass reads behind the prompt.

    `evicts`: the whole prompt is read, and then keys and values are dropped. `chosen`: positions
    that a method keeps which needs no pass.
    """

    reason: FilterReason | None
    num_kept: int
    budget: Budget
    fails_open: bool = False
    layer: int | None = None
    rows: tuple[int, ...] = ()
    tapped: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] | None = None
    coverage_bound: float = 0.0
    repeated: tuple[int, ...] = ()
    evicts: bool = False
    chosen: tuple[int, ...] | None = None

    def having(self, **changes: Any) -> FilterPlan:
        """The plan with some fields changed."""
        return replace(self, **changes)
