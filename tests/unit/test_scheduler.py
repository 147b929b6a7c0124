"""Scheduler and memory pool under thousands of seeded random traces, without torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from random import Random

import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.memory import MemoryPool, Move, Repack, Span
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Kept, StepOutput, StepPlan

LAYERS = 8
TRACES = int(os.environ.get("GEMSERVE_TEST_TRACES", "1000"))


def sequence(
    order: int,
    prompt: int,
    keep: int | None,
    max_tokens: int,
    *,
    is_adaptive: bool = False,
    priority: int = 0,
    repeated: int = 0,
) -> LiveSequence:
    count = prompt if keep is None else keep
    budget = Budget(
        low=1 if is_adaptive else count, high=count, limit=prompt if is_adaptive else count
    )
    return LiveSequence(
        request=Request(
            request_id=str(order),
            prompt_ids=range(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            filter=FilterParams(method="none" if keep is None else "sieve", keep=keep or 16),
            priority=priority,
            plan=FilterPlan(
                reason="disabled" if keep is None else None,
                num_kept=count,
                budget=budget,
                layer=None if keep is None else 2,
                repeated=() if keep is None else tuple(range(repeated)),
            ),
        ),
        order=order,
    )


def scheduler(capacity: int, max_running: int = 64) -> Scheduler:
    return Scheduler(MemoryPool(capacity), num_layers=LAYERS, max_running=max_running)


def random_sequence(rng: Random, order: int) -> LiveSequence:
    prompt = int(2 ** rng.uniform(0, 11))
    keep = rng.randrange(1, prompt) if prompt > 1 and rng.random() < 0.6 else None
    return sequence(
        order,
        prompt,
        keep,
        rng.randrange(1, 20),
        is_adaptive=rng.random() < 0.5,
        priority=rng.choice((0, 0, 0, -1, 5)),
        repeated=rng.choice((0, 0, 0, 7)),
    )


def perform(s: Scheduler, plan: StepPlan, rng: Random, failure_rate: float) -> StepOutput:
    """A fake runner: draws tokens, chooses positions, fails now and then.

    A chunk is through after two steps on average.
    """
    tokens: dict[int, list[int]] = {}
    kept: dict[int, Kept] = {}
    chunk = plan.chunk
    is_done = rng.random() < 0.5
    if chunk is not None and is_done:
        if chunk.is_last and chunk.is_filter:
            reader = s.sequences[chunk.sequence]
            everything = range(reader.num_prompt)
            budget = reader.plan.budget  # fewer than reserved for, or more
            count = rng.choice((rng.randint(budget.low, budget.high), budget.limit))
            positions = sorted(rng.sample(everything, count))
            kept[chunk.sequence] = kept_of(reader, positions)
        elif chunk.is_last:
            tokens[chunk.sequence] = [rng.randrange(100)]
    decoding = [row.sequence for row in plan.decodes]
    tokens.update({number: [rng.randrange(100)] for number in decoding})
    touched = [*decoding, *([chunk.sequence] if chunk is not None else [])]
    failures = frozenset(number for number in touched if rng.random() < failure_rate)
    finished = frozenset(
        number
        for number in tokens
        if number not in failures and (is_at_its_end(s.sequences[number]) or rng.random() < 0.05)
    )
    return StepOutput(
        is_chunk_done=is_done, tokens=tokens, kept=kept, finished=finished, failures=failures
    )


def kept_of(s: LiveSequence, positions: Iterable[int]) -> Kept:
    """A choice of these positions."""
    positions = tuple(positions)
    return Kept(positions=positions, ids=[s.request.prompt_ids[at] for at in positions])


def is_at_its_end(sequence: LiveSequence) -> bool:
    return len(sequence.generated) + 1 == sequence.request.sampling.max_tokens


def check_plan(s: Scheduler, plan: StepPlan) -> None:
    """Passes are read in order, once, and a chunk begun is the chunk gone on with."""
    chunk = plan.chunk
    if chunk is not None:
        assert not plan.decodes
        assert chunk.count > 0
        reader = s.sequences[chunk.sequence]
        assert reader.open_tokens in (0, chunk.count)
        assert chunk.start == reader.done
        assert chunk.is_last == (chunk.start + chunk.count == reader.pass_length)
        assert chunk.place == reader.place
    for row in plan.decodes:
        decoding = s.sequences[row.sequence]
        assert decoding.state is State.DECODING
        assert (row.token, row.place) == (decoding.generated[-1], decoding.place)
        assert row.slot == decoding.num_kept + len(decoding.generated) - 1


def run_trace(seed: int) -> None:
    rng = Random(seed)
    largest = 2 * LAYERS * (2**11 + 20)
    s = scheduler(rng.randrange(largest, 3 * largest), max_running=rng.choice((2, 8, 64)))
    pending = [random_sequence(rng, i) for i in range(rng.randrange(1, 25))]
    everyone = list(pending)
    failure_rate = rng.choice((0.0, 0.02))
    for _ in range(20_000):
        while pending and rng.random() < 0.4:
            s.add(pending.pop(0))
        if rng.random() < 0.03 and (s.running or s.waiting):
            s.finish(rng.choice([*s.running, *s.waiting]))
        plan = s.schedule(rng.choice((8, 300, 5000)), is_decode_due=rng.random() < 0.5)
        s.check_integrity()
        check_plan(s, plan)
        if rng.random() < 0.01:
            assert pickle.loads(pickle.dumps(plan)) == plan, "a runner may be in another process"
        assert not plan.is_empty or s.is_idle, "work waits and nothing is planned"
        s.commit(plan, perform(s, plan, rng, failure_rate))
        s.check_integrity()
        if s.is_idle and not pending:
            break
    else:
        raise AssertionError("the trace did not end")
    assert s.pool.used == 0
    for q in everyone:
        assert q.state is State.FINISHED
        assert q.span is None
        assert len(q.generated) <= q.request.sampling.max_tokens


def test_random_traces() -> None:
    for seed in range(TRACES):
        run_trace(seed)


def test_a_broken_invariant_is_caught() -> None:
    """Integrity checks that cannot fail prove nothing: break each fact once."""

    def prepared() -> Scheduler:
        s = scheduler(100_000)
        for order in range(3):
            s.add(sequence(order, 200, 32, 4))
        s.schedule(10, is_decode_due=True)
        s.check_integrity()
        return s

    def overlap(s: Scheduler) -> None:
        s.pool._spans[1].start -= 1

    def leak(s: Scheduler) -> None:
        s.running.pop()

    def miscount(s: Scheduler) -> None:
        s.pool._used += 1

    def wrong_state(s: Scheduler) -> None:
        s.running[0].state = State.WAITING

    def double_owner(s: Scheduler) -> None:
        s.running[1].span = s.running[0].span
        s.running[1].num_kept += 1

    for breakage in (overlap, leak, miscount, wrong_state, double_owner):
        broken = prepared()
        breakage(broken)
        with pytest.raises(AssertionError):
            broken.check_integrity()


def test_memory_that_is_free_but_scattered_is_still_used() -> None:
    """Contiguous spans without compaction refuse a request that the free bytes could hold."""
    pool = MemoryPool(100)
    spans = [pool.allocate(10) for _ in range(10)]
    for span in spans[::2]:
        assert span is not None
        pool.release(span)
    assert pool.free == 50
    assert pool.allocate(50) is None
    pool.compact(50)
    moves = pool.take_changes()
    data = list(range(100))
    for move in moves:
        data[move.target : move.target + move.size] = data[move.source : move.source + move.size]
    for i, span in enumerate(spans[1::2]):
        assert span is not None
        assert data[span.start : span.start + 10] == list(range(10 + 20 * i, 20 + 20 * i))
    assert pool.allocate(50) is not None
    pool.check_integrity()


def pool_with_gaps() -> tuple[MemoryPool, list[Span]]:
    """Spans of 10, 40, 10 and 20 units with gaps of 5 behind each."""
    pool = MemoryPool(100)
    spans = [pool.allocate(size) for size in (10, 5, 40, 5, 10, 5, 20)]
    made = [span for span in spans if span is not None]
    for span in made[1::2]:
        pool.release(span)
    return pool, made[::2]


def test_compaction_moves_as_little_as_makes_room() -> None:
    """It moved everything: in full memory that is most of the pool for each request admitted."""
    pool, _ = pool_with_gaps()
    assert (pool.free, pool.num_moved(5), pool.num_moved(10), pool.num_moved(15)) == (20, 0, 10, 30)
    pool.compact(10)
    assert pool.take_changes() == [Move(60, 55, 10)]
    assert pool.allocate(10) is not None
    pool.check_integrity()


def test_compaction_goes_around_what_must_stay() -> None:
    """Else a short request waited for a chunk of a long prompt: 47 s with a model of 1.5B."""
    pool, (_, large, middle, last) = pool_with_gaps()
    assert not pool.compact(10, [large, middle, last])
    assert not pool.take_changes()
    assert pool.compact(10, [middle, last])
    assert pool.take_changes() == [Move(15, 10, 40)]
    assert (large.start, middle.start, last.start) == (10, 60, 75)
    assert pool.allocate(10) is not None
    pool.check_integrity()
    assert pool.compact(10, [middle])
    assert pool.take_changes() == [Move(75, 70, 20)]


def test_a_repacked_span_keeps_the_beginning_of_each_row() -> None:
    pool = MemoryPool(100)
    span = pool.allocate(40)
    assert span is not None
    pool.repack(span, [(4, 10, 7)])
    assert (span.size, pool.used) == (28, 28)
    assert pool.take_changes() == [Repack(0, 4, 10, 7)]
    pool.check_integrity()


def test_what_lies_behind_repacked_rows_follows_them() -> None:
    pool = MemoryPool(100)
    span = pool.allocate(40)
    assert span is not None
    pool.repack(span, [(2, 10, 7), (3, 4, 4), (2, 4, 1)])
    assert pool.take_changes() == [Repack(0, 2, 10, 7, 20), Repack(26, 2, 4, 1, 0)]
    assert (span.size, pool.used) == (28, 28)
    pool.check_integrity()


def test_shared_spans_are_freed_by_their_last_owner() -> None:
    pool = MemoryPool(10)
    span = pool.allocate(10)
    assert span is not None
    pool.retain(span)
    pool.release(span)
    assert pool.used == 10
    pool.release(span)
    assert pool.used == 0
    with pytest.raises(AssertionError):
        pool.release(span)


def test_a_short_prompt_does_not_wait_behind_a_huge_one() -> None:
    s = scheduler(10_000_000)
    s.add(sequence(0, 100_000, 64, 4))
    s.add(sequence(1, 60, None, 4))
    rng = Random(0)
    turns = [0, 0]
    while not any(q.order == 1 and q.state is State.DECODING for q in s.running):
        plan = s.schedule(200, is_decode_due=False)
        assert plan.chunk is not None
        turns[plan.chunk.sequence] += 1
        s.commit(plan, perform(s, plan, rng, 0.0))
        assert sum(turns) < 20
    assert abs(turns[0] - turns[1]) <= 1  # nor does the huge one starve


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """Small requests kept the pool nearly full; the large one at the head never fitted."""
    s = scheduler(2 * LAYERS * 1000)
    rng = Random(0)
    s.add(sequence(0, 500, None, 20))
    s.schedule(1000, is_decode_due=True)
    large = sequence(1, 960, None, 20)
    s.add(large)
    for order in range(2, 2000):
        if len(s.waiting) < 10:
            s.add(sequence(order, 100, None, 20))
        plan = s.schedule(1000, is_decode_due=rng.random() < 0.5)
        s.commit(plan, perform(s, plan, rng, 0.0))
        if large.state is not State.WAITING:
            return
    raise AssertionError("never admitted")


def test_a_long_prompt_is_not_overtaken_for_ever_while_others_are_read() -> None:
    """Small ones took each piece of memory that became free, and four of them were always read."""
    s = scheduler(2 * LAYERS * 1000)
    rng = Random(0)
    for order in range(6):
        s.add(sequence(order, 150, None, 1))
    s.schedule(20, is_decode_due=False)
    s.add(large := sequence(6, 800, None, 1))
    for order in range(7, 4000):
        if len(s.waiting) < 10:
            s.add(sequence(order, 150, None, 1))
        plan = s.schedule(20, is_decode_due=False)
        s.commit(plan, perform(s, plan, rng, 0.0))
        if large.state is not State.WAITING:
            return
    raise AssertionError("never admitted")


def test_memory_is_not_moved_under_an_open_chunk() -> None:
    """A pass points to its memory. Throwing it away for every move let a long prompt starve."""
    s = scheduler(2 * LAYERS * 400)
    for order, prompt in enumerate((100, 90, 150)):
        s.add(sequence(order, prompt, None, 10))
    rng = Random(1)
    s.schedule(8, is_decode_due=True)
    s.finish(s.running[1])  # a gap of 100 tokens before the third, 30 after it
    plan = s.schedule(8, is_decode_due=True)
    assert plan.chunk is not None
    s.commit(plan, StepOutput(is_chunk_done=False))
    s.add(sequence(3, 110, None, 10))  # fits only once the third has moved
    begun = plan.chunk.sequence
    plan = s.schedule(8, is_decode_due=True)
    assert not plan.moves
    assert plan.chunk is not None
    assert plan.chunk.sequence == begun
    s.commit(plan, StepOutput(is_chunk_done=True))
    plan = s.schedule(8, is_decode_due=True)
    assert plan.moves
    assert len(s.running) == 3
    s.commit(plan, perform(s, plan, rng, 0.0))
    s.check_integrity()


def test_memory_is_moved_beside_an_open_chunk() -> None:
    """A short prompt waited for the chunk of a long one: 47 s with a model of 1.5B."""
    s = scheduler(2 * LAYERS * 400)
    for order, prompt in enumerate((60, 90, 70, 100)):
        s.add(sequence(order, prompt, None, 10))
    plan = s.schedule(8, is_decode_due=True)
    first, second, third, fourth = s.running
    assert plan.chunk is not None
    assert plan.chunk.sequence == first.order
    s.commit(plan, StepOutput(is_chunk_done=False))
    s.finish(second)  # gaps of 100 and 40 tokens on both sides of the third and the fourth
    s.add(sequence(4, 120, None, 10))
    plan = s.schedule(8, is_decode_due=True)
    assert plan.moves
    assert first.open_tokens
    assert first.memory.start == 0
    assert len(s.running) == 4
    s.commit(plan, StepOutput(is_chunk_done=False))
    s.check_integrity()
    assert third.memory.start < fourth.memory.start


def test_passes_under_way_are_few() -> None:
    """Each later prompt is shorter, and would be nearer its end than those begun."""
    s = scheduler(10**7)
    most = 0
    for order in range(200):
        if order < 50:
            s.add(sequence(order, 1000 - 10 * order, None, 2))
        plan = s.schedule(64, is_decode_due=False)
        assert plan.chunk is not None
        is_through = order % 4 == 3 and not plan.chunk.is_last
        s.commit(plan, StepOutput(is_chunk_done=is_through))
        most = max(most, sum(q.open_tokens > 0 for q in s.running))
    assert most <= 2


def test_decoding_waits_until_it_is_due() -> None:
    """Between decode steps the time belongs to prompts; without prompts, to decoding."""
    s = scheduler(10**6)
    s.add(sequence(0, 10, None, 10))
    rng = Random(0)
    while not any(q.state is State.DECODING for q in s.running):
        plan = s.schedule(100, is_decode_due=False)
        s.commit(plan, perform(s, plan, rng, 0.0))
    assert s.schedule(100, is_decode_due=False).decodes
    s.add(sequence(1, 500, None, 10))
    assert not s.schedule(100, is_decode_due=False).decodes
    assert s.schedule(100, is_decode_due=True).decodes


def test_a_request_that_never_fits_is_told_so() -> None:
    s = scheduler(1000)
    assert not s.fits_ever(sequence(0, 1000, None, 10))
    assert s.fits_ever(sequence(0, 40, None, 10))


def test_what_waits_is_admitted_by_priority_then_arrival() -> None:
    queue = scheduler(2 * LAYERS * 20, max_running=1)
    for order, priority in enumerate((0, 5, -1, 0, -1)):
        queue.add(sequence(order, 10, None, 1, priority=priority))
    ended: list[int] = []
    while not queue.is_idle:
        plan = queue.schedule(100, is_decode_due=False)
        assert plan.chunk is not None
        done = plan.chunk.sequence
        ended.append(done)
        queue.commit(plan, StepOutput(tokens={done: [1]}, finished=frozenset({done})))
    assert ended == [2, 4, 0, 3, 1]
