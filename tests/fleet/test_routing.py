"""Which replica gets a request. Most tests are failures of other routers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from gemserve.cost import ModelShape
from gemserve_fleet.replicas.replica_reports import ReplicaReports, report_of
from gemserve_fleet.replicas.routing import (
    ModelReading,
    Reading,
    ReplicaState,
    RoutedRequest,
    TokenCosts,
    choose_replica,
)
from gemserve_fleet.replicas.text_chunks import TextChunk

COSTS = TokenCosts(full=3.0, answered=1.0)
BOUND = 100_000


def _document(name: str, num_chunks: int = 32, tokens: int = 2_000) -> tuple[TextChunk, ...]:
    return tuple(TextChunk(f"{name}/{index}".encode(), tokens) for index in range(num_chunks))


def _keys(document: tuple[TextChunk, ...]) -> frozenset[bytes]:
    return frozenset(chunk.key for chunk in document)


def _request(document: tuple[TextChunk, ...] = ()) -> RoutedRequest:
    return RoutedRequest(chunks=document, beside_tokens=100, kept_tokens=1_000, answer_tokens=100)


def _state(name: str, queued: float = 0.0, cached: frozenset[bytes] = frozenset()) -> ReplicaState:
    return ReplicaState(name=name, queued_tokens=queued, cached=cached)


def _chosen(
    request: RoutedRequest, *states: ReplicaState, seed: int = 0, bound: float = BOUND
) -> str | None:
    route = choose_replica(request, states, COSTS, most_above_mean=bound, random=Random(seed))
    return None if route is None else route.name


def test_no_replica_and_one_replica() -> None:
    assert _chosen(_request()) is None
    assert _chosen(_request(_document("a")), _state("only", 1e9)) == "only"


def test_work_counts_what_is_not_cached() -> None:
    document = _document("a")
    half = _keys(document[16:])
    request = _request(document)
    state = _state("one", 0, half)
    route = choose_replica(request, [state], COSTS, most_above_mean=BOUND, random=Random(0))
    assert route is not None
    assert route.reason == "cached"
    assert route.cached_tokens == 32_000
    assert route.work_tokens == 32_000 + 100 + 3 * 1_000 + 100
    # one sequence is cached from its beginning only
    cases: tuple[tuple[Reading, int], ...] = (("one_pass", 64_100), ("whole", 3 * 64_100))
    for reading, read in cases:
        one = replace(request, reading=reading)
        route = choose_replica(one, [state], COSTS, most_above_mean=BOUND, random=Random(0))
        assert route is not None
        assert (route.cached_tokens, route.work_tokens) == (0, read + 3_100)


def test_a_document_stays_where_it_is() -> None:
    document = _document("a")
    assert _chosen(_request(document), _state("x"), _state("y", 30_000, _keys(document))) == "y"


def test_a_miss_goes_to_the_shortest_queue_not_to_the_smallest_cache() -> None:
    """SGLang sent it to the replica whose tree was smallest, however busy that was."""
    large = frozenset().union(*(_keys(_document(str(index))) for index in range(50)))
    states = _state("small cache", 80_000), _state("large cache", 0, large)
    assert _chosen(_request(_document("new")), *states) == "large cache"


def test_one_long_request_is_more_than_many_short_ones() -> None:
    short = sum(200 for _ in range(100))
    assert _chosen(_request(), _state("one long", 200_000), _state("many short", short)) == (
        "many short"
    )


def test_affinity_ends_at_the_bound() -> None:
    document = _document("a", num_chunks=1_000)  # two million tokens: worth any queue
    request = _request(document)
    states = _state("x", 0), _state("y", 0), _state("z", 300_000, _keys(document))
    assert _chosen(request, *states, bound=250_000) == "z"
    assert _chosen(request, *states, bound=150_000) in ("x", "y")


def test_no_choice_is_beyond_the_bound() -> None:
    random = Random(1)
    for _ in range(300):
        states = [
            _state(str(index), random.choice([0, random.random() * 1e6]))
            for index in range(random.randint(1, 9))
        ]
        bound = random.choice([0, 1_000, 100_000])
        name = _chosen(_request(), *states, bound=bound)
        mean = sum(state.queued_tokens for state in states) / len(states)
        chosen = next(state for state in states if state.name == name)
        assert chosen.queued_tokens <= mean + bound + 1e-3


def test_equal_queues_are_not_all_above_their_mean() -> None:
    """Three times 0.1 has a mean that is not 0.1."""
    queues = [_state(str(index), 0.1) for index in range(3)]
    assert _chosen(_request(), *queues, bound=0) is not None


def test_a_hot_document_comes_to_live_on_several_replicas() -> None:
    """Rebalancing must copy what is hot; what is not stays where it is."""
    hot, cold = _document("hot"), _document("cold")
    cached = {"x": _keys(hot) | _keys(cold), "y": frozenset[bytes](), "z": frozenset[bytes]()}
    queued = dict.fromkeys(cached, 0.0)
    random = Random(0)
    for _ in range(150):
        states = [_state(name, queued[name], cached[name]) for name in cached]
        route = choose_replica(_request(hot), states, COSTS, most_above_mean=BOUND, random=random)
        assert route is not None
        queued[route.name] += route.work_tokens
        cached[route.name] |= _keys(hot)
    assert all(_keys(hot) <= keys for keys in cached.values())
    states = [_state(name, queued[name], cached[name]) for name in cached]
    assert _chosen(_request(cold), *states) == "x"


def test_balancing_does_not_throw_affinity_away() -> None:
    """SGLang left its trees alone only while request counts were balanced."""
    documents = {name: _document(name) for name in "abc"}
    queues = {"a": 40_000, "b": 0, "c": 10_000}
    states = [_state(name, queues[name], _keys(documents[name])) for name in documents]
    for name in documents:
        assert _chosen(_request(documents[name]), *states) == name


@pytest.mark.parametrize("num_replicas", [2, 5, 16])
def test_every_replica_gets_its_share_of_new_documents(num_replicas: int) -> None:
    """A healthy replica that is never sent anything."""
    states = [_state(f"replica-{index}") for index in range(num_replicas)]
    count = Counter(
        _chosen(_request(_document(f"document {index}")), *states) for index in range(800)
    )
    assert min(count.values()) > 800 / num_replicas / 2


def test_short_requests_are_spread() -> None:
    count = Counter(_chosen(_request(), _state("x"), _state("y"), seed=seed) for seed in range(200))
    assert min(count["x"], count["y"]) > 60


def test_among_equals_a_text_keeps_its_replica() -> None:
    """Two routers, or one before the first report, do not read it twice without need."""
    states = [_state(f"replica-{index}") for index in range(8)]
    document = _document("a")
    assert len({_chosen(_request(document), *states, seed=seed) for seed in range(20)}) == 1
    home = _chosen(_request(document), *states)
    others = [state for state in states if state.name in (home, "replica-0", "replica-7")]
    assert _chosen(_request(document), *others) == home


def test_replicas_that_take_nothing() -> None:
    document = _document("a")
    have = _state("have", 0, _keys(document))
    for state in (replace(have, is_healthy=False), replace(have, is_draining=True)):
        assert _chosen(_request(document), state, _state("other", 1e6)) == "other"
        assert _chosen(_request(document), state) is None


def test_a_replica_out_of_use_is_not_in_the_mean() -> None:
    document = _document("a", num_chunks=1_000)
    request = _request(document)
    states = _state("x", 0), _state("z", 300_000, _keys(document))
    dead = replace(_state("dead", 10_000_000), is_healthy=False)
    assert _chosen(request, *states, dead, bound=100_000) == "x"


@pytest.mark.parametrize("queued", [-1.0, float("nan"), float("inf")])
def test_a_wrong_queue_falls_back_to_the_least_loaded(queued: float) -> None:
    document = _document("a")
    states = _state("wrong", queued, _keys(document)), _state("x", 5), _state("y", 7)
    for seed in range(10):
        assert _chosen(_request(document), *states, seed=seed) == "x"
    route = choose_replica(
        _request(document), states, COSTS, most_above_mean=BOUND, random=Random(0)
    )
    assert route is not None
    assert route.reason == "least_loaded"
    assert route.work_tokens > 64_000  # the queue grows by it all the same
    assert _chosen(_request(), _state("all wrong", queued)) == "all wrong"


def test_other_inconsistencies_fall_back_too() -> None:
    document = _document("a")
    states = _state("x", 5), _state("y", 9, _keys(document))
    wrong = _request((TextChunk(b"k", -5),))
    assert _chosen(wrong, *states) == "x"
    assert _chosen(_request(document), *states, _state("y", 6)) == "x"  # one name twice
    costs = TokenCosts(full=float("nan"), answered=1)
    route = choose_replica(
        _request(document), states, costs, most_above_mean=BOUND, random=Random(0)
    )
    assert route is not None
    assert (route.name, route.work_tokens) == ("x", 0.0)


def test_costs_of_a_shape() -> None:
    shape = ModelShape(
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        vocab_size=128_256,
        layer_params=218_103_808,
        qkv_params=25_165_824,
        element_bytes=2,
    )
    costs = TokenCosts.of_shape(shape, layer=13, segment_size=8_192, kept=1_024, answered=1)
    assert 2.1 < costs.full < 2.2  # 32 layers for 13, less what a segment attends to beyond 1,024


def _queue(reports: ReplicaReports, name: str) -> float:
    return next(state.queued_tokens for state in reports.states() if state.name == name)


def _reports() -> ReplicaReports:
    reports = ReplicaReports()
    reports.set_replicas(["x", "y"])
    return reports


def _route(reports: ReplicaReports, request: RoutedRequest) -> tuple[str, int]:
    route = choose_replica(
        request, reports.states(), COSTS, most_above_mean=BOUND, random=Random(0)
    )
    assert route is not None
    return route.name, reports.sent(route)


def _sent(reports: ReplicaReports, request: RoutedRequest) -> tuple[str, int]:
    """As the router does: with the keys of the request's chunks."""
    route = choose_replica(
        request, reports.states(), COSTS, most_above_mean=BOUND, random=Random(0)
    )
    assert route is not None
    return route.name, reports.sent(route, keys=_keys(request.chunks))


def test_what_was_sent_counts_until_a_report_counts_it() -> None:
    """Without it, all requests between two reports went to the same replica."""
    reports = _reports()
    names = [_route(reports, _request(_document("a")))[0] for _ in range(10)]
    assert names.count("x") == 5
    assert _queue(reports, "x") == 5 * (64_100 + 3_100)
    reports.reported("x", queued_tokens=1_000, last_received=None)
    assert _queue(reports, "x") == 1_000


def test_counts_do_not_drift() -> None:
    """A count that is raised and lowered in two places is wrong after the first lost message."""
    reports = _reports()
    for _ in range(100):
        name, number = _route(reports, _request(_document("a")))
        reports.reported(name, queued_tokens=0, last_received=number)
        assert _queue(reports, name) == 0


def test_a_request_on_its_way_is_not_lost_from_the_count() -> None:
    reports = _reports()
    reports.set_replicas(["x"])
    _, first = _route(reports, _request())
    _route(reports, _request(_document("a")))
    reports.reported("x", queued_tokens=50, last_received=first)
    assert _queue(reports, "x") == 50 + 64_100 + 3_100


def test_a_request_that_never_arrives_is_taken_back() -> None:
    reports = _reports()
    reports.set_replicas(["x"])
    _, number = _route(reports, _request(_document("a")))
    reports.ended("x", number)
    reports.ended("x", number)
    assert _queue(reports, "x") == 0
    _route(reports, _request(_document("a")))
    for _ in range(3):
        reports.reported("x", queued_tokens=0, last_received=number)
    assert _queue(reports, "x") == 0


def test_a_cache_is_what_the_replica_says() -> None:
    """vLLM's production stack takes for granted that what was sent there is there."""
    reports = _reports()
    document = _document("a")
    name, number = _route(reports, _request(document))
    other = "y" if name == "x" else "x"
    reports.reported(name, queued_tokens=0, last_received=number)
    reports.cache_listed(name, 0, [])
    reports.cache_listed(other, 0, [])
    key = document[0].key
    assert all(key not in state.cached for state in reports.states())
    assert reports.cache_changed(other, 1, stored=_keys(document))
    assert _route(reports, _request(document))[0] == other
    reports.reported(other, queued_tokens=1_000, last_received=None)
    assert reports.cache_changed(other, 2, dropped=_keys(document))
    assert _route(reports, _request(document))[0] == name  # its queue is shorter


def test_a_question_follows_the_one_that_is_having_its_document_read() -> None:
    """Two questions about a new document, one after another, were read by two replicas."""
    reports = _reports()
    document = _document("a")
    request = _request(document)
    name, number = _sent(reports, request)
    assert _sent(reports, request)[0] == name
    other = "y" if name == "x" else "x"
    reports.reported(other, queued_tokens=500, last_received=None)
    reports.reported(name, queued_tokens=1_000, last_received=number + 1)
    assert _sent(reports, request)[0] == name  # the report tells of the queue, not of the cache


def test_what_was_on_its_way_is_believed_until_the_last_request_ends() -> None:
    reports = _reports()
    reports.set_replicas(["x"])
    document = _document("a")
    numbers = [_sent(reports, _request(document))[1] for _ in range(2)]
    key = document[0].key
    assert key in reports.states()[0].cached
    reports.ended("x", numbers[0])
    reports.ended("x", numbers[0])
    assert key in reports.states()[0].cached
    reports.ended("x", numbers[1])
    assert key not in reports.states()[0].cached
    reports.cache_listed("x", 0, _keys(document))
    assert key in reports.states()[0].cached
    reports.ended("gone", 1)


def test_a_replica_without_a_cache_will_not_have_what_it_reads() -> None:
    reports = _reports()
    model = ModelReading(reading="windows", costs=COSTS, has_cache=False)
    for name in ("x", "y"):
        report = report_of(1, queued_tokens=0, last_received=0, cached=b"", model=model)
        reports.take(name, report)
    document = _document("a")
    name, _ = _sent(reports, _request(document))
    assert all(document[0].key not in state.cached for state in reports.states())
    assert _sent(reports, _request(document))[0] != name


def test_a_restarted_replica_has_nothing_on_its_way() -> None:
    reports = _reports()
    document = _document("a")
    name, _ = _sent(reports, _request(document))
    reports.set_replicas([])
    reports.set_replicas([name])
    assert document[0].key not in reports.states()[0].cached


def test_a_missing_change_of_a_cache_forgets_it() -> None:
    """A restarted replica has an empty cache, and begins to count anew."""
    reports = _reports()
    assert not reports.cache_changed("x", 1, stored=[b"before any list"])
    reports.cache_listed("x", 7, [b"a"])
    assert reports.cache_changed("x", 8, stored=[b"b"])
    assert not reports.cache_changed("x", 10, stored=[b"d"])
    assert not reports.cache_changed("x", 11, stored=[b"e"])
    assert b"a" not in reports.states()[0].cached
    reports.cache_listed("x", 11, [b"a", b"d"])
    assert reports.cache_changed("x", 12, dropped=[b"a"])
    assert b"a" not in reports.states()[0].cached
    assert b"d" in reports.states()[0].cached


def test_replicas_come_and_go() -> None:
    """A replica that has never reported gets requests, and one that is gone leaves nothing."""
    reports = _reports()
    reports.reported("x", queued_tokens=50, last_received=None)
    reports.set_replicas(["x", "new"])
    assert _route(reports, _request())[0] == "new"
    reports.reported("y", queued_tokens=1, last_received=None)
    reports.cache_listed("y", 0, [b"a"])
    assert not reports.cache_changed("y", 1)
    reports.ended("y", 1)
    assert [state.name for state in reports.states()] == ["x", "new"]
    reports.set_replicas([])
    assert reports.states() == []
