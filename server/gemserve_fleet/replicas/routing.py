"""Which replica of a fleet gets a request. No Ray, no torch.

Each replica is given a cost: the tokens that it would have to read for the request, those that it
would only have to read again, and what waits there already. The smallest cost wins. So a document
goes to a replica that has it, until the queue there is twice as long as reading the document
elsewhere would take; then another replica reads it, and has it, too.

All of this is counted in one unit, a token of a filter pass: see `TokenCosts`. Requests are never
counted: one of 200,000 tokens is not one of 200.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from random import Random
from typing import Literal

from gemserve.cost import ModelShape
from gemserve_fleet.replicas.text_chunks import TextChunk

# How the long text of a request is read: in segments, each of which may be in a cache; by the lower
# layers as one sequence, or by all layers. The latter two are cached from the beginning only.
Reading = Literal["windows", "one_pass", "whole"]
# Why a replica was chosen. "least_loaded": it has the shortest queue; nothing else was compared,
# because of the others' states or the request something is wrong.
RouteReason = Literal["cached", "uncached", "least_loaded"]
# Tokens by which a queue may exceed the mean. Costs alone keep affinity from making it longer than
# two of the longest document; this holds if what they are computed from is wrong.
MOST_ABOVE_MEAN = 1 << 20
# The request's own work counts twice beside what waits before it: those who come later wait for it,
# too, and what is read a second time displaces another document from a cache. In simulated fleets
# 2 finds more in caches than 1 does, and waits are shorter; 4 is no better unless all are too busy.
_OWN_WORK = 2.0
# Costs that differ by less than this share of the request's own work are equal. In simulated fleets
# 0.1 finds a little more in caches than 0.01 does, and 0.5 makes the slowest requests wait longer.
_EQUAL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """What a token costs, where a token of a filter pass costs 1.

    `full`: a token that all layers read; `answered`: one of the answer; `cached`: one that the
    filter layers have read before, which the question must only look at.
    """

    full: float
    answered: float
    cached: float = 0.0

    @staticmethod
    def of_shape(
        shape: ModelShape, *, layer: int, segment_size: int, kept: int, answered: float
    ) -> TokenCosts:
        """Costs by counted FLOPs: segments of `segment_size` tokens are read up to `layer`.

        `kept`: tokens that all layers then read. `answered`: see the class. FLOPs do not tell it,
        because a decode step reads all weights, for however many answers. Divide its time among as
        many answers as run at most, not among few: another answer adds little to a step.
        """
        filtered = shape.filter_chunk(0, segment_size, layer) / segment_size
        return TokenCosts(full=shape.prefill_chunk(0, kept) / kept / filtered, answered=answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What a router must know of a request.

    `chunks`: of its long texts (`text_chunks`). `beside_tokens`: of all other text, which is read
    on any replica. `kept_tokens`: what all layers read of a filtered prompt. `answer_tokens`: how
    many are expected; `max_tokens` is only the most, and agents send 32,000.
    """

    chunks: tuple[TextChunk, ...]
    reading: Reading = "windows"
    beside_tokens: int
    kept_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """How a replica's model reads long prompts.

    `kept_tokens`: of a filtered one, by all layers. `has_cache`: whether anything of a prompt is
    found again.
    """

    reading: Reading
    costs: TokenCosts
    kept_tokens: int = 0
    has_cache: bool = True


# until a replica has said it; all of a fleet have the same model
UNKNOWN_READING = ModelReading(reading="windows", costs=TokenCosts(full=1.0, answered=1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What is known of a replica.

    `queued_tokens`: the work that waits or runs there, in tokens of a filter pass. `cached`: the
    keys of the chunks that the replica has said to have stored, without those that it has dropped,
    and of those that it is reading.
    `is_draining`: it finishes what it has and takes nothing new. `model`: how it reads.
    """

    name: str
    queued_tokens: float
    cached: Container[bytes] = frozenset()
    is_healthy: bool = True
    is_draining: bool = False
    model: ModelReading = UNKNOWN_READING


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes, and by how much its work makes that queue longer."""

    name: str
    reason: RouteReason
    work_tokens: float
    cached_tokens: int


def choose_replica(
    request: RoutedRequest,
    states: Sequence[ReplicaState],
    costs: TokenCosts,
    *,
    most_above_mean: float = MOST_ABOVE_MEAN,
    random: Random,
) -> Route | None:
    """The replica of the smallest cost. None: no replica is healthy and takes requests.

    A replica whose queue is more than `most_above_mean` tokens of a filter pass above the mean gets
    nothing, whatever it has cached. Among equals, requests with the same text go to the same
    replica, and requests without long text to any.
    """
    usable = [state for state in states if state.is_healthy and not state.is_draining]
    if not usable:
        return None
    if not _is_consistent(request, usable, costs):
        return _least_loaded(request, usable, costs, random)
    mean = sum(state.queued_tokens for state in usable) / len(usable)
    # Rounding may leave the mean below all of several equal queues.
    shortest = min(state.queued_tokens for state in usable)
    longest = max(mean + most_above_mean, shortest)
    routes = [
        (state.queued_tokens + _OWN_WORK * route.work_tokens, route)
        for state in usable
        if state.queued_tokens <= longest
        for route in [route_to(request, state, costs)]
    ]
    least, best = min(routes, key=lambda pair: pair[0])
    bound = least + _EQUAL * best.work_tokens
    equals = [route for cost, route in routes if cost <= bound]
    return _spread(request, equals, random)


def route_to(request: RoutedRequest, state: ReplicaState, costs: TokenCosts) -> Route:
    """The route to this replica, whatever others there are."""
    num_cached = _cached_tokens(request, state.cached)
    num_uncached = sum(chunk.tokens for chunk in request.chunks) - num_cached
    read = request.beside_tokens + num_uncached
    work = (
        (costs.full if request.reading == "whole" else 1.0) * read
        + costs.cached * num_cached
        + costs.full * request.kept_tokens
        + costs.answered * request.answer_tokens
    )
    return Route(
        name=state.name,
        reason="cached" if num_cached else "uncached",
        work_tokens=work,
        cached_tokens=num_cached,
    )


def _cached_tokens(request: RoutedRequest, cached: Container[bytes]) -> int:
    """Tokens of the request's chunks that need not be read again."""
    if request.reading == "windows":
        return sum(chunk.tokens for chunk in request.chunks if chunk.key in cached)
    total = 0
    for chunk in request.chunks:
        if chunk.key not in cached:
            break
        total += chunk.tokens
    return total


def _is_consistent(
    request: RoutedRequest, states: Sequence[ReplicaState], costs: TokenCosts
) -> bool:
    """Can costs be compared at all? Counts that have drifted may be negative or not finite."""
    numbers = [
        *(state.queued_tokens for state in states),
        *(chunk.tokens for chunk in request.chunks),
        request.beside_tokens,
        request.kept_tokens,
        request.answer_tokens,
        costs.full,
        costs.answered,
        costs.cached,
    ]
    names = {state.name for state in states}
    return len(names) == len(states) and all(is_count(number) for number in numbers)


def is_count(number: float) -> bool:
    """Can this be a number of tokens?"""
    return isfinite(number) and number >= 0


def _least_loaded(
    request: RoutedRequest, states: Sequence[ReplicaState], costs: TokenCosts, random: Random
) -> Route:
    """Any of the shortest queues. A number that cannot be right counts as the largest."""
    queues = [s.queued_tokens if is_count(s.queued_tokens) else inf for s in states]
    shortest = min(queues)
    state = random.choice([s for s, queue in zip(states, queues, strict=True) if queue == shortest])
    work = route_to(request, replace(state, cached=()), costs).work_tokens
    return Route(
        name=state.name,
        reason="least_loaded",
        work_tokens=work if is_count(work) else 0.0,
        cached_tokens=0,
    )


def _spread(request: RoutedRequest, equals: Sequence[Route], random: Random) -> Route:
    """One of `equals`: by the text, so that it stands on as few replicas as its load allows.

    The smallest key stays the same while most of a text does. (Rendezvous hashing: what one text
    gets does not depend on which other replicas there are.)
    """
    if len(equals) == 1:
        return equals[0]
    if not request.chunks:
        return random.choice(equals)
    text = min(chunk.key for chunk in request.chunks)
    return min(
        equals,
        key=lambda route: hashlib.blake2b(text + route.name.encode(), digest_size=8).digest(),
    )
