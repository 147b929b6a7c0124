"""Does a simulated replica take as long as the engine's own scheduler and pace do?

They are driven with a clock of the test's: a fake runner says how long each step takes. Nothing is
fitted: the simulated replica has its rules from `engine/scheduling`, and these are the originals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling.pace import Crowd, Pace
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Chunk, Kept, StepOutput, StepPlan
from gemserve_fleet.simulator.load import Arrival, OfferedLoad, arrivals
from gemserve_fleet.simulator.replica import Replica, ReplicaMemory, SimulatedJob
from gemserve_fleet.simulator.request_cost import RequestCost

LAYERS, FILTER_LAYER = 8, 2
PROMPT, KEPT, ANSWER = 16_384, 512, 64
CHUNK_TOKENS = 2_048
TARGET_S = 0.25
TOKEN_S = 0.0001  # through all layers
STEP_S, SEQUENCE_S = 0.01, 0.0002
QUESTION = 16  # tokens at the end of a prompt, which no other has
FILTER_UNITS = 2 * FILTER_LAYER + 1  # of a token in a filter pass


def _units(tokens: int, layers: int) -> int:
    return 2 * layers * tokens


def _cost(is_filtered: bool) -> RequestCost:
    share = FILTER_LAYER / LAYERS if is_filtered else 1.0
    kept = KEPT if is_filtered else PROMPT
    return RequestCost(
        reading="one_pass" if is_filtered else "whole",
        num_pieces=1,
        piece_tokens=PROMPT,
        kept_tokens=KEPT if is_filtered else 0,
        read_s=PROMPT * share * TOKEN_S,
        cached_s=QUESTION * share * TOKEN_S,
        rest_s=KEPT * TOKEN_S if is_filtered else 0.0,
        piece_bytes=PROMPT * FILTER_UNITS,
        reading_bytes=PROMPT * FILTER_UNITS if is_filtered else 0,
        decoding_bytes=_units(kept + ANSWER, LAYERS),
        answer_tokens=ANSWER - 1,  # the first token comes with the prompt
        step_s=STEP_S,
        sequence_s=SEQUENCE_S,
        products_s=0.0,
    )


def _sequence(number: int, document: int, is_filtered: bool) -> LiveSequence:
    count = KEPT if is_filtered else PROMPT
    tokens = np.full(PROMPT, document)
    tokens[-QUESTION:] = 1_000_000 + number
    return LiveSequence(
        request=Request(
            request_id=str(number),
            prompt_ids=tokens.tolist(),
            sampling=SamplingParams(max_tokens=ANSWER),
            filter=FilterParams(method="sieve" if is_filtered else "none", keep=KEPT),
            plan=FilterPlan(
                reason=None if is_filtered else "disabled",
                num_kept=count,
                budget=Budget(low=count, high=count, limit=count),
                layer=FILTER_LAYER if is_filtered else None,
                rows=tuple(range(PROMPT - QUESTION, PROMPT)) if is_filtered else (),
            ),
        ),
        order=number,
    )


@dataclass
class _Times:
    """Of one request each, in the order of arrival."""

    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    num_hits: int = 0


def _run_engine(
    arriving: Sequence[Arrival], capacity: int, is_filtered: bool, cache_units: int = 0
) -> _Times:
    """What `Core.step` does, with a clock that a step advances by what it would take."""
    scheduler = Scheduler(
        MemoryPool(capacity), num_layers=LAYERS, max_running=256, cache_units=cache_units
    )
    pace, times = Pace(TARGET_S), _Times()
    now_s, next_arrival = 0.0, 0
    left_s: dict[int, float] = {}  # of the chunks under way
    while next_arrival < len(arriving) or not scheduler.is_idle:
        if scheduler.is_idle:
            now_s = max(now_s, arriving[next_arrival].time_s)
        while next_arrival < len(arriving) and arriving[next_arrival].time_s <= now_s:
            document = arriving[next_arrival].document
            scheduler.add(_sequence(next_arrival, document, is_filtered))
            next_arrival += 1
        decoding = sum(s.state is State.DECODING for s in scheduler.running)
        unread = len(scheduler.running) + len(scheduler.waiting) - decoding
        crowd = Crowd(decoding, unread)
        slice_s = pace.slice_s(crowd)
        plan = scheduler.schedule(CHUNK_TOKENS, is_decode_due=pace.is_decode_due(crowd))
        if plan.decodes:
            taken_s = STEP_S + SEQUENCE_S * len(plan.decodes)
            pace.observe_decode(taken_s)
            is_done = False
        else:
            chunk = plan.chunk
            assert chunk is not None
            left = left_s.pop(chunk.sequence, _chunk_s(chunk))
            taken_s = min(left, slice_s)
            pace.observe_slice(taken_s)
            is_done = left - taken_s <= 1e-9
            if not is_done:
                left_s[chunk.sequence] = left - taken_s
        now_s += taken_s
        output = _output(scheduler, plan, is_done)
        for number in output.tokens:
            times.first.setdefault(number, now_s - arriving[number].time_s)
        times.num_hits += sum(scheduler.sequences[n].num_cached > 0 for n in output.kept)
        for number in output.finished:
            times.last[number] = now_s - arriving[number].time_s
        scheduler.commit(plan, output)
    return times


def _chunk_s(chunk: Chunk) -> float:
    return chunk.count * TOKEN_S * (FILTER_LAYER / LAYERS if chunk.is_filter else 1.0)


def _output(scheduler: Scheduler, plan: StepPlan, is_done: bool) -> StepOutput:
    tokens = {row.sequence: [1] for row in plan.decodes}
    kept: dict[int, Kept] = {}
    chunk = plan.chunk
    if chunk is not None and chunk.is_last and is_done:
        if chunk.is_filter:
            kept[chunk.sequence] = Kept(positions=range(KEPT), ids=range(KEPT))
        else:
            tokens[chunk.sequence] = [1]
    ended = [n for n in tokens if len(scheduler.sequences[n].generated) + 1 == ANSWER]
    return StepOutput(is_chunk_done=is_done, tokens=tokens, kept=kept, finished=frozenset(ended))


def _run_simulated(
    arriving: Sequence[Arrival], capacity: int, is_filtered: bool, cache_units: int = 0
) -> _Times:
    replica = Replica(
        _cost(is_filtered),
        ReplicaMemory(kv_bytes=capacity, cache_bytes=cache_units, step_target_s=TARGET_S),
    )
    jobs = [
        SimulatedJob(n, arrival.document, (str(arrival.document).encode(),), arrival.time_s)
        for n, arrival in enumerate(arriving)
    ]
    for job in jobs:
        while replica.next_event_s() <= job.arrived_s:
            replica.advance(replica.next_event_s())
        replica.advance(job.arrived_s)
        replica.submit(job)
    while replica.num_requests:
        replica.advance(replica.next_event_s())
    times = _Times()
    for job in jobs:
        assert job.first_token_s is not None
        assert job.finished_s is not None
        times.first[job.number] = job.first_token_s - job.arrived_s
        times.last[job.number] = job.finished_s - job.arrived_s
    times.num_hits = sum(job.num_cached for job in jobs)
    return times


def _assert_alike(simulated: _Times, engine: _Times) -> None:
    """Means and 95th percentiles of the times to the first and to the last token."""
    for ours, theirs in ((simulated.first, engine.first), (simulated.last, engine.last)):
        a, b = (np.array(list(times.values())) for times in (ours, theirs))
        assert len(a) == len(b)
        assert a.mean() == pytest.approx(b.mean(), rel=0.09)
        assert np.percentile(a, 95) == pytest.approx(np.percentile(b, 95), rel=0.1)


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("places", [4, 60])
def test_a_simulated_replica_takes_as_long_as_the_scheduler(
    is_filtered: bool, load: float, places: int
) -> None:
    """`load`: the share of time that reading takes. `places`: prompts that fit into memory.

    With two places, which block each other all the time, the simulated one is up to 0.16 slower.
    """
    cost = _cost(is_filtered)
    capacity = places * cost.peak_bytes
    rate = OfferedLoad(requests_per_s=load / cost.reading_s(0), new_share=1.0)
    arriving = list(arrivals(rate, 200, seed=3))
    engine = _run_engine(arriving, capacity, is_filtered)
    simulated = _run_simulated(arriving, capacity, is_filtered)
    _assert_alike(simulated, engine)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.parametrize("cached", [4, 12])
def test_a_simulated_replica_finds_as_much_in_its_cache(load: float, cached: int) -> None:
    """`load`: the share of time that reading took without the cache. `cached`: documents in it."""
    cost = _cost(is_filtered=True)
    cache_units = cached * cost.piece_bytes
    capacity = 2 * cache_units
    rate = OfferedLoad(requests_per_s=load / cost.reading_s(0), documents=30, new_share=0.3)
    arriving = list(arrivals(rate, 300, seed=4))
    engine = _run_engine(arriving, capacity, True, cache_units)
    simulated = _run_simulated(arriving, capacity, True, cache_units)
    assert engine.num_hits > 30
    assert abs(simulated.num_hits - engine.num_hits) <= 3
    _assert_alike(simulated, engine)
