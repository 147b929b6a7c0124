"""Which replica a request goes to: the seam between the relay and the rules of routing.

A rule is a function of a request's hints and the states of all replicas. It returns the replicas'
ids, the best one first. It runs for every request, so it must be fast and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What the ingress knows of a request. `num_tokens` is estimated from the body's length.

    `only`: the one replica that it is for. `avoid`: replicas that it has failed on. `home`: the
    replica that has read `home_tokens` of what the request is about.
    """

    num_tokens: int = 0
    tenant: bytes = b""
    only: str | None = None
    avoid: frozenset[str] = frozenset()
    home: str | None = None
    home_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica that runs. `queued_tokens`: to be read and drawn, as it last said.

    `sent_tokens`: of requests that were sent to it since then, and have not ended. `statistics`:
    all that it last said.
    """

    id: str
    queued_tokens: int = 0
    sent_tokens: int = 0
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return self.queued_tokens + self.sent_tokens


OrderReplicas = Callable[[RoutingHints, Sequence[ReplicaState]], Sequence[str]]


def least_loaded(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    """All replicas, first the one with the fewest tokens to do, those of the request included."""

    def tokens(state: ReplicaState) -> int:
        return state.load - (hints.home_tokens if state.id == hints.home else 0)

    return [state.id for state in sorted(states, key=tokens)]


def order_replicas(
    hints: RoutingHints,
    states: Sequence[ReplicaState],
    rule: OrderReplicas,
    on_failure: Callable[[], None],
) -> list[str]:
    """The replicas that may have a request, by `rule`, or by load where the rule fails.

    A replica that the request has failed on comes last. `only` leaves no other.
    """
    if hints.only is not None:
        return [state.id for state in states if state.id == hints.only]
    known = [state.id for state in states]
    try:
        ordered = [each for each in rule(hints, states) if each in known]
        if set(ordered) != set(known) or len(ordered) != len(known):
            raise ValueError(f"the rule has ordered {len(ordered)} of {len(known)} replicas")
    except Exception:
        on_failure()
        ordered = least_loaded(hints, states)
    return sorted(ordered, key=lambda each: each in hints.avoid)
