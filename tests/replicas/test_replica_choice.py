"""The order of replicas, whatever a rule does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemserve.replicas.replica_choice import (
    ReplicaState,
    RoutingHints,
    least_loaded,
    order_replicas,
)

STATES = [
    ReplicaState(id="a", queued_tokens=500, sent_tokens=100),
    ReplicaState(id="b", queued_tokens=0, sent_tokens=550),
    ReplicaState(id="c", queued_tokens=1000),
]


def ordered(hints: RoutingHints, rule: object = least_loaded) -> tuple[list[str], int]:
    failures: list[int] = []
    order = order_replicas(hints, STATES, rule, lambda: failures.append(1))  # type: ignore[arg-type]
    return order, len(failures)


def test_the_queue_is_counted_in_tokens_with_what_was_just_sent() -> None:
    assert ordered(RoutingHints()) == (["b", "a", "c"], 0)


def test_a_replica_that_has_read_the_document_may_be_busier_by_as_much() -> None:
    assert ordered(RoutingHints(home="c", home_tokens=449))[0] == ["b", "c", "a"]
    assert ordered(RoutingHints(home="c", home_tokens=451))[0] == ["c", "b", "a"]
    assert ordered(RoutingHints(home="gone", home_tokens=10_000))[0] == ["b", "a", "c"]


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
