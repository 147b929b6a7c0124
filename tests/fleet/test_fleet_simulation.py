"""Laws that a simulated fleet must follow, whatever its figures are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from gemserve.accelerators import DEVICES
from gemserve.cost import ModelShape
from gemserve_fleet.replicas.routing import Reading
from gemserve_fleet.simulator.load import Arrival, OfferedLoad, arrivals
from gemserve_fleet.simulator.piece_cache import PieceCache
from gemserve_fleet.simulator.policies import POLICIES
from gemserve_fleet.simulator.replica import Replica, ReplicaMemory, SimulatedJob
from gemserve_fleet.simulator.request_cost import MeasuredSpeeds, RequestCost, request_cost
from gemserve_fleet.simulator.simulation import Outcome, simulate
from gemserve_fleet.simulator.sizing import smallest_fleet

# Reads a document of 8 pieces in 0.8 s, and answers with 50 tokens in 0.5 s.
COST = RequestCost(
    reading="windows",
    num_pieces=8,
    piece_tokens=1_000,
    kept_tokens=100,
    read_s=0.1,
    cached_s=0.002,
    rest_s=0.01,
    piece_bytes=10,
    reading_bytes=20,
    decoding_bytes=5,
    answer_tokens=50,
    step_s=0.01,
    sequence_s=0.0002,
    products_s=0.0001,
)
MEMORY = ReplicaMemory(kv_bytes=1_000, cache_bytes=500)
LLAMA = ModelShape(
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
WEIGHTS = 16_060_522_496


def _load(requests_per_s: float, num_requests: int = 2_000, **fields: float) -> list[Arrival]:
    load = replace(OfferedLoad(requests_per_s=requests_per_s), **fields)  # type: ignore[arg-type]
    return list(arrivals(load, num_requests, seed=1))


def _outcome(
    arriving: Sequence[Arrival],
    num_replicas: int = 4,
    policy: str = "router",
    cost: RequestCost = COST,
    memory: ReplicaMemory = MEMORY,
) -> Outcome:
    return simulate(cost, memory, arriving, num_replicas=num_replicas, policy=policy)


def _llama(reading: Reading, num_tokens: int, speeds: MeasuredSpeeds | None = None) -> RequestCost:
    return request_cost(
        LLAMA,
        DEVICES["h100"],
        reading,
        num_tokens=num_tokens,
        keep=1_024,
        max_tokens=256,
        layer=13,
        segment_size=8_192,
        weight_bytes=WEIGHTS,
        speeds=speeds or MeasuredSpeeds(),
    )


@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_one_replica_waits_as_queueing_theory_says(utilisation: float) -> None:
    """M/D/1: Poisson arrivals, one time for all. Pollaczek and Khinchine's mean wait."""
    cost = replace(COST, answer_tokens=0)
    service_s = cost.reading_s(0)
    arriving = _load(utilisation / service_s, 40_000, new_share=1.0)
    outcome = _outcome(arriving, 1, cost=cost, memory=replace(MEMORY, cache_bytes=0))
    assert outcome.reading_share == pytest.approx(utilisation, rel=0.03)
    assert outcome.decoding_share == 0
    wait_s = utilisation / (2 * (1 - utilisation)) * service_s
    assert outcome.ttft_mean_s == pytest.approx(service_s + wait_s, rel=0.1)


def test_random_choice_makes_each_replica_a_queue_of_its_own() -> None:
    cost = replace(COST, answer_tokens=0)
    service_s = cost.reading_s(0)
    arriving = _load(4 * 0.7 / service_s, 40_000, new_share=1.0)
    outcome = _outcome(arriving, 4, "random", cost, replace(MEMORY, cache_bytes=0))
    wait_s = 0.7 / (2 * 0.3) * service_s
    assert outcome.ttft_mean_s == pytest.approx(service_s + wait_s, rel=0.1)
    shared = _outcome(arriving, 4, "least loaded", cost, replace(MEMORY, cache_bytes=0))
    assert shared.ttft_mean_s < service_s + wait_s / 2


def test_a_request_alone() -> None:
    outcome = _outcome([Arrival(0.0, 1), Arrival(100.0, 2)], 1)
    assert outcome.ttft_p99_s == pytest.approx(COST.reading_s(0))
    assert outcome.answer_p95_s == pytest.approx(COST.reading_s(0) + 50 * 0.0102)


def test_reading_and_decoding_share_the_time() -> None:
    """One stream, one prompt: 1.7 times as long for the prompt as for the stream (`Pace`)."""
    outcome = _outcome([Arrival(0.0, 1), Arrival(0.82, 2)], 1)
    # The stream begins at 0.81 s. From 0.82 s on it has 1 / 2.7 of the time.
    first_s = 0.81 + 0.01 + (50 * 0.0102 - 0.01) * 2.7
    second_s = first_s + (0.81 - (first_s - 0.82) * 1.7 / 2.7) - 0.82
    jobs_p50 = outcome.ttft_p50_s  # of both
    assert jobs_p50 == pytest.approx((0.81 + min(0.81 * 2.7 / 1.7, second_s)) / 2, rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("requests_per_s", [1.0, 6.0, 50.0])
def test_every_request_is_answered_once(policy: str, requests_per_s: float) -> None:
    outcome = _outcome(_load(requests_per_s, 600), policy=policy)
    assert outcome.num_sent == outcome.num_finished == 600
    assert outcome.busiest <= 1 + 1e-9
    assert outcome.ttft_p50_s <= outcome.ttft_p95_s <= outcome.ttft_p99_s
    assert outcome.hit_rate <= outcome.repeat_rate


@pytest.mark.parametrize("policy", POLICIES)
def test_documents_that_are_all_different_are_never_hit(policy: str) -> None:
    outcome = _outcome(_load(4.0, 500, new_share=1.0), policy=policy)
    assert outcome.hit_rate == outcome.repeat_rate == 0


def test_a_large_cache_hits_whatever_was_sent_before() -> None:
    large = ReplicaMemory(kv_bytes=10**9, cache_bytes=10**9)
    outcome = _outcome(_load(0.5, 1_000), 1, memory=large)
    assert 0.2 < outcome.hit_rate == pytest.approx(outcome.repeat_rate, abs=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_has_the_same_outcome(policy: str) -> None:
    assert _load(4.0) == _load(4.0)
    assert _load(4.0) != list(arrivals(OfferedLoad(requests_per_s=4.0), 2_000, seed=2))
    assert _outcome(_load(4.0, 400), policy=policy) == _outcome(_load(4.0, 400), policy=policy)


def test_memory_is_never_exceeded() -> None:
    """The cache stays within its bytes, and within what running requests leave."""
    memory = ReplicaMemory(kv_bytes=300, cache_bytes=150)
    replica = Replica(COST, memory)
    random = Random(0)
    now_s, most_cached, most_held = 0.0, 0, 0
    finished: list[SimulatedJob] = []
    for number in range(500):
        now_s += random.expovariate(4)
        while (event_s := replica.next_event_s()) <= now_s:
            finished += replica.advance(event_s)
            assert replica.cache.used <= memory.cache_bytes
            assert replica.cache.used + replica.held_bytes <= memory.kv_bytes
        finished += replica.advance(now_s)
        document = random.randrange(6)
        keys = tuple(f"{document}/{piece}".encode() for piece in range(8))
        replica.submit(SimulatedJob(number, document, keys, now_s))
        assert replica.cache.used + replica.held_bytes <= memory.kv_bytes
        most_cached = max(most_cached, replica.cache.used)
        most_held = max(most_held, replica.held_bytes)
        assert replica.num_requests + len(finished) == number + 1
    while replica.num_requests:
        finished += replica.advance(replica.next_event_s())
    assert most_cached == 150
    assert most_held > 150  # the cache gave way
    assert sorted(job.number for job in finished) == list(range(500))
    assert replica.held_bytes == 0
    assert replica.queued_s == pytest.approx(0, abs=1e-6)
    assert replica.left_answer_tokens == pytest.approx(0, abs=1e-3)


def test_the_oldest_piece_goes_first_and_changes_are_told() -> None:
    cache = PieceCache(piece_bytes=10, limit=30)
    cache.store([b"a", b"b", b"c"], available=100)
    assert cache.use([b"a", b"x"]) == 1
    cache.store([b"d"], available=100)
    assert cache.count([b"a", b"b", b"c", b"d"]) == 3
    assert cache.take_changes() == ([b"a", b"c", b"d"], [b"b"])
    cache.store([b"e"], available=20)
    assert cache.used == 20
    assert cache.take_changes() == ([b"e"], [b"c", b"a"])
    assert not cache.can_hold(4)


def test_requests_about_one_document_read_it_once() -> None:
    """While another reads it they wait, and then take it from the cache."""
    arriving = [Arrival(100.0 * (index // 5) + 0.001 * index, index // 5) for index in range(20)]
    outcome = _outcome(arriving, 1)
    assert outcome.hit_rate == pytest.approx(0.8)


def test_the_router_has_more_hits_than_load_alone_and_shorter_queues_than_a_hash() -> None:
    arriving = _load(4.0, 4_000, documents=50)
    outcomes = {policy: _outcome(arriving, policy=policy) for policy in POLICIES}
    router = outcomes["router"]
    for other in ("least loaded", "random"):
        assert router.hit_rate > 1.3 * outcomes[other].hit_rate
    assert router.ttft_p95_s < min(outcomes[o].ttft_p95_s for o in outcomes if o != "router")


def test_a_smaller_fleet_than_the_smallest_is_too_slow() -> None:
    arriving = _load(6.0, 2_000)
    best = smallest_fleet(COST, MEMORY, arriving, ttft_p95_s=3.0)
    assert best is not None
    assert best.ttft_p95_s <= 3.0
    less = _outcome(arriving, best.num_replicas - 1)
    assert less.ttft_p95_s > 3.0 or less.requests_per_s < 0.97 * 6.0
    assert smallest_fleet(COST, MEMORY, arriving[:100], ttft_p95_s=0.001) is None


def test_costs_are_those_that_were_measured_on_an_h100() -> None:
    """docs/benchmarks.md, with cuDNN's attention. The model is half of the peaks, not fitted."""
    assert _llama("whole", 131_072).reading_s(0) == pytest.approx(12.0, rel=0.1)
    filtered = _llama("one_pass", 131_072)
    assert filtered.read_s == pytest.approx(4.87, rel=0.1)
    decoding = replace(filtered, sequence_s=filtered.sequence_s * (1_024 + 16) / (1_024 + 256))
    for num_sequences, step_s in ((1, 0.00875), (16, 0.011), (64, 0.0146), (256, 0.0308)):
        assert decoding.decode_step_s(num_sequences) == pytest.approx(step_s, rel=0.12)


def test_costs_of_the_ways_to_read() -> None:
    whole, one_pass, segments = (_llama(way, 131_072) for way in ("whole", "one_pass", "windows"))
    assert one_pass.reading_s(0) / whole.reading_s(0) == pytest.approx(0.41, abs=0.01)
    assert segments.reading_s(0) / whole.reading_s(0) == pytest.approx(0.15, abs=0.02)
    for cost in (whole, one_pass, segments):
        assert cost.reading_s(cost.num_pieces) < 0.07 * cost.reading_s(0)
    assert segments.num_pieces == 16
    assert segments.piece_bytes * 16 == one_pass.piece_bytes < whole.piece_bytes
    assert segments.peak_bytes < 0.1 * one_pass.peak_bytes


def test_measured_speeds_replace_the_published_ones() -> None:
    speeds = MeasuredSpeeds(read=1_000.0, filtered=4_000.0, decode=20.0)
    assert _llama("whole", 65_536, speeds).read_s == pytest.approx(65.536)
    segments = _llama("windows", 65_536, speeds)
    assert segments.read_s == pytest.approx(8_192 / 4_000)
    assert segments.rest_s == pytest.approx(1.024, rel=0.01)
    assert segments.decode_step_s(1) == segments.decode_step_s(64) == 0.05


def test_popularity_falls_with_the_rank() -> None:
    documents = np.array([arrival.document for arrival in _load(1.0, 20_000)])
    counts = np.bincount(documents[documents < 1_000], minlength=1_000)
    assert counts.sum() / 20_000 == pytest.approx(0.5, abs=0.02)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.3)
    assert len(set(documents[documents >= 1_000])) == (documents >= 1_000).sum()
