"""The smallest fleet that answers a load in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from gemserve_fleet.simulator.load import Arrival
from gemserve_fleet.simulator.replica import ReplicaMemory
from gemserve_fleet.simulator.request_cost import RequestCost
from gemserve_fleet.simulator.simulation import WARM_UP, Outcome, simulate

MOST_REPLICAS = 4_096
# Of the requests that arrive, this share must be answered meanwhile. Otherwise queues grow.
_KEPT_UP = 0.97


def smallest_fleet(
    cost: RequestCost,
    memory: ReplicaMemory,
    arriving: Sequence[Arrival],
    *,
    ttft_p95_s: float,
    policy: str = "router",
    seed: int = 0,
) -> Outcome | None:
    """The outcome of the smallest fleet whose TTFT is at most `ttft_p95_s` for 95% of the requests.

    None: no fleet reaches that, or none of up to `MOST_REPLICAS`.
    """
    if _fastest_p95_s(cost, memory, arriving) > ttft_p95_s:
        return None
    passed_s = arriving[-1].time_s - arriving[0].time_s
    rate = (len(arriving) - 1) / passed_s

    def outcome_of(num_replicas: int) -> Outcome:
        return simulate(cost, memory, arriving, num_replicas=num_replicas, policy=policy, seed=seed)

    counted = arriving[int(WARM_UP * len(arriving)) :]
    counted_rate = (len(counted) - 1) / (counted[-1].time_s - counted[0].time_s)

    def is_enough(outcome: Outcome) -> bool:
        has_kept_up = outcome.requests_per_s >= _KEPT_UP * counted_rate
        return outcome.ttft_p95_s <= ttft_p95_s and has_kept_up

    return _search(outcome_of, is_enough, start=ceil(rate * cost.reading_s(0)))


def _fastest_p95_s(cost: RequestCost, memory: ReplicaMemory, arriving: Sequence[Arrival]) -> float:
    """What no fleet is faster than: nobody waits, and what was ever sent is in all caches."""
    seen: set[int] = set()
    times: list[float] = []
    for arrival in arriving:
        is_cached = arrival.document in seen and memory.cache_bytes > 0
        times.append(cost.reading_s(cost.num_pieces if is_cached else 0))
        seen.add(arrival.document)
    return float(np.percentile(times[int(WARM_UP * len(times)) :], 95))


def _search(
    outcome_of: Callable[[int], Outcome], is_enough: Callable[[Outcome], bool], start: int
) -> Outcome | None:
    """The outcome of the least number that is enough, by doubling steps and then by halves."""
    low, high = 0, min(max(1, start), MOST_REPLICAS)
    best: Outcome | None = None
    while best is None:
        outcome = outcome_of(high)
        if is_enough(outcome):
            best = outcome
        elif high == MOST_REPLICAS:
            return None
        else:
            low, high = high, min(MOST_REPLICAS, ceil(high * 1.4))
    while high - low > 1:
        middle = (low + high) // 2
        outcome = outcome_of(middle)
        if is_enough(outcome):
            high, best = middle, outcome
        else:
            low = middle
    return best
