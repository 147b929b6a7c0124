"""The order of replicas, whatever a rule does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gemserve_fleet.replicas.replica_choice import RoutingHints, by_cost, order_replicas, route_of
from gemserve_fleet.replicas.routing import ReplicaState
from gemserve_fleet.replicas.text_chunks import TextChunk

STATES = [
    ReplicaState(name="a", queued_tokens=600),
    ReplicaState(name="b", queued_tokens=550),
    ReplicaState(name="c", queued_tokens=1000),
]

CHUNKS = (TextChunk(b"1", 600), TextChunk(b"2", 400))


def ordered(hints: RoutingHints, rule: object = by_cost) -> tuple[list[str], int]:
    failures: list[int] = []
    order = order_replicas(hints, STATES, rule, lambda: failures.append(1))  # type: ignore[arg-type]
    return order, len(failures)


def test_the_shortest_queue_is_first() -> None:
    assert ordered(RoutingHints()) == (["b", "a", "c"], 0)


def test_a_replica_that_has_read_the_document_may_be_busier_by_twice_as_much() -> None:
    assert ordered(RoutingHints(home="c", home_tokens=200))[0] == ["b", "a", "c"]
    assert ordered(RoutingHints(home="c", home_tokens=300))[0] == ["c", "b", "a"]
    assert ordered(RoutingHints(home="gone", home_tokens=100))[0] == ["b", "a", "c"]


def test_what_is_about_a_document_goes_where_it_is() -> None:
    hints = RoutingHints(home="c", is_about_home=True)
    assert ordered(hints)[0] == ["c", "b", "a"]
    assert ordered(replace(hints, avoid=frozenset("c")))[0] == ["b", "a", "c"]


def test_a_text_goes_where_it_is_cached_until_the_queue_there_is_twice_as_long() -> None:
    hints = RoutingHints(chunks=CHUNKS, prompt_tokens=1_000)
    keys = frozenset(chunk.key for chunk in CHUNKS)
    for queued, best in ((1_800, "x"), (2_100, "y")):
        states = [
            ReplicaState(name="x", queued_tokens=queued, cached=keys),
            ReplicaState(name="y", queued_tokens=0),
        ]
        assert order_replicas(hints, states, by_cost, pytest.fail)[0] == best
    assert route_of(hints, states[0], states).work_tokens == 0
    assert route_of(hints, states[1], states).work_tokens == 1_000


@pytest.mark.parametrize("queued", [-1.0, float("nan"), float("inf")])
def test_a_report_that_cannot_be_right_is_counted_and_load_decides(queued: float) -> None:
    failures: list[int] = []
    states = [ReplicaState(name="wrong", queued_tokens=queued), *STATES]
    order = order_replicas(RoutingHints(), states, by_cost, lambda: failures.append(1))
    assert (order, len(failures)) == (["b", "a", "c", "wrong"], 1)


def test_a_replica_that_the_request_has_failed_on_comes_last() -> None:
    assert ordered(RoutingHints(avoid=frozenset("b")))[0] == ["a", "c", "b"]


def test_a_request_for_one_replica_goes_nowhere_else() -> None:
    assert ordered(RoutingHints(only="c"))[0] == ["c"]
    assert ordered(RoutingHints(only="gone"))[0] == []


def raises(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    raise KeyError("a rule's bug")


@pytest.mark.parametrize(
    "rule", [raises, lambda *_: [], lambda *_: ["a", "a", "b"], lambda *_: ["a", "b"]]
)
def test_a_rule_that_fails_is_counted_and_load_decides(rule: object) -> None:
    assert ordered(RoutingHints(), rule) == (["b", "a", "c"], 1)


def test_a_rule_may_name_replicas_that_have_gone() -> None:
    assert ordered(RoutingHints(), lambda *_: ["c", "gone", "a", "b"]) == (["c", "a", "b"], 0)
