"""Which replica a request goes to: the seam between the relay and the rules of routing.

A rule is a function of a request's hints and the states of all replicas. It returns the replicas'
names, the best one first. It runs for every request, so it must be fast and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from gemserve_fleet.replicas.routing import (
    UNKNOWN_READING,
    ModelReading,
    ReplicaState,
    Route,
    RoutedRequest,
    choose_replica,
    is_count,
    route_to,
)
from gemserve_fleet.replicas.text_chunks import TextChunk

_RANDOM = Random()
_DOCUMENT = b"document"  # stands for the key of a stored document, of which only the home is known


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What the ingress knows of a request.

    `number`: larger than those of earlier requests. `prompt_tokens`: estimated, without those of
    stored documents that it names. `chunks`: of its text, if it is long. `only`: the one replica
    that it is for. `avoid`: replicas that it has failed on. `home`: the replica that has read
    `home_tokens` of stored documents that the request names. `is_about_home`: it is about such a
    document itself, as when it is deleted.
    """

    number: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    chunks: tuple[TextChunk, ...] = ()
    only: str | None = None
    avoid: frozenset[str] = frozenset()
    home: str | None = None
    home_tokens: int = 0
    is_about_home: bool = False


OrderReplicas = Callable[[RoutingHints, Sequence[ReplicaState]], Sequence[str]]


def by_cost(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    """All replicas: first the one of the smallest cost, then by load. Raises `ValueError`.

    The error says that the reports cannot be right.
    """
    if not states:
        return []
    seen = [_with_document(state, hints) for state in states]
    model = _model_of(states)
    route = choose_replica(_request_of(hints, states), seen, model.costs, random=_RANDOM)
    if route is None or route.reason == "least_loaded":
        raise ValueError(f"no costs can be compared: {[s.queued_tokens for s in states]}")
    others = least_loaded(hints, states)
    return [route.name, *(name for name in others if name != route.name)]


def least_loaded(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    """All replicas, by their queues. What cannot be the length of a queue counts as the longest."""

    def tokens(state: ReplicaState) -> float:
        return state.queued_tokens if is_count(state.queued_tokens) else inf

    return [state.name for state in sorted(states, key=tokens)]


def order_replicas(
    hints: RoutingHints,
    states: Sequence[ReplicaState],
    rule: OrderReplicas,
    on_failure: Callable[[], None],
) -> list[str]:
    """The replicas that may have a request, by `rule`, or by load where the rule fails.

    Those that the request has failed on come last, by load. `only` leaves no other.
    """
    if hints.only is not None:
        return [state.name for state in states if state.name == hints.only]
    tried = [state for state in states if state.name in hints.avoid]
    new = [state for state in states if state.name not in hints.avoid]
    known = [state.name for state in new]
    try:
        ordered = [each for each in rule(hints, new) if each in known]
        if set(ordered) != set(known) or len(ordered) != len(known):
            raise ValueError(f"the rule has ordered {len(ordered)} of {len(known)} replicas")
    except Exception:
        on_failure()
        ordered = least_loaded(hints, new)
    if hints.is_about_home:
        ordered.sort(key=lambda each: each != hints.home)
    return ordered + least_loaded(hints, tried)


def route_of(hints: RoutingHints, state: ReplicaState, states: Sequence[ReplicaState]) -> Route:
    """The route to `state`, which some rule has chosen: by how much its queue grows."""
    request = _request_of(hints, states)
    return route_to(request, _with_document(state, hints), _model_of(states).costs)


def _request_of(hints: RoutingHints, states: Sequence[ReplicaState]) -> RoutedRequest:
    model = _model_of(states)
    chunks = hints.chunks
    beside = 0 if chunks else hints.prompt_tokens
    if hints.home_tokens:
        chunks = (TextChunk(_DOCUMENT, hints.home_tokens), *chunks)
    num_tokens = beside + sum(chunk.tokens for chunk in chunks)
    return RoutedRequest(
        chunks=chunks,
        reading=model.reading,
        beside_tokens=beside,
        kept_tokens=min(model.kept_tokens, num_tokens),
        answer_tokens=hints.answer_tokens,
    )


def _with_document(state: ReplicaState, hints: RoutingHints) -> ReplicaState:
    if not hints.home_tokens or state.name != hints.home:
        return state
    asked = (chunk.key for chunk in hints.chunks)
    return replace(state, cached={_DOCUMENT, *(key for key in asked if key in state.cached)})


def _model_of(states: Sequence[ReplicaState]) -> ModelReading:
    told = (state.model for state in states if state.model != UNKNOWN_READING)
    return next(told, UNKNOWN_READING)
