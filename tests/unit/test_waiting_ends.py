"""No request waits for ever while others are admitted, and none holds all others up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gemserve.engine.cache.common_tokens import num_common
from gemserve.engine.memory import MemoryPool
from gemserve.engine.reuse.lookup import MAX_TIMES_PASSED, find_cached
from gemserve.engine.scheduling.request_memory import RequestMemory
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.scheduling.time_shares import Portion
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import StepOutput, StepPlan
from tests.unit import test_document_cache, test_scheduler
from tests.unit.test_document_cache import LAYERS, FakeMemory, cached, finish, sequence
from tests.unit.test_fair_shares import ALICE, BOB, of
from tests.unit.test_scheduler import kept_of

SHARED = Portion(64, None)


def drawn(s: Scheduler, plan: StepPlan) -> StepOutput:
    """A filter keeps all that it may; an answer ends at `max_tokens`."""
    kept, tokens = {}, {row.sequence: [1] for row in plan.decodes}
    if plan.chunk is not None and plan.chunk.is_last:
        read = s.sequences[plan.chunk.sequence]
        if plan.chunk.is_filter:
            kept[read.order] = kept_of(read, range(read.plan.budget.limit))
        else:
            tokens[read.order] = [1]
    ended = (
        n
        for n in tokens
        if len(s.sequences[n].generated) + 1 >= s.sequences[n].request.sampling.max_tokens
    )
    return StepOutput(tokens=tokens, kept=kept, finished=frozenset(ended))


def keep_short_ones(
    s: Scheduler, large: LiveSequence, counts: dict[bytes, int], rng: Random, order: int
) -> int:
    """Add short requests until each key has so many beside `large`. The next one's number."""
    for tenant, count in counts.items():
        others = [q for q in s.sequences.values() if q is not large]
        for _ in range(count - sum(q.request.tenant == tenant for q in others)):
            asked = {"is_whole": True, "max_tokens": rng.randrange(20, 60)}
            s.add(sequence(order, [order] * 150, tenant=tenant, **asked))
            order += 1
    return order


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_prompt_that_lacks_memory_is_admitted_though_others_are_overtaken_too(
    share: float,
) -> None:
    """One of them was always being read, and so nobody left memory to the longest prompt."""
    capacity = 160_000
    s = Scheduler(
        MemoryPool(capacity), num_layers=LAYERS, max_running=256, cache_units=int(share * capacity)
    )
    large, order = sequence(0, [5] * 6900, is_whole=True, max_tokens=50), 1
    for step in range(6000):
        if step == 1000:
            s.add(large)
        others = [q for q in s.sequences.values() if q is not large]
        for is_short, count in ((False, 16), (True, 6)):
            alike = sum((q.num_prompt < 100) == is_short for q in others)
            for _ in range(count - alike):
                made = sequence(order, [order] * 4000, max_tokens=50)
                if is_short:
                    made = sequence(order, [order] * 20, is_whole=True, max_tokens=4)
                s.add(made)
                order += 1
        plan = s.schedule(256, is_decode_due=step % 2 == 0)
        s.commit(plan, drawn(s, plan))
        if step >= 1000 and large.state is not State.WAITING:
            return
    raise AssertionError(f"overtaken {large.times_passed} times")


def test_others_go_on_beside_one_that_lacks_memory() -> None:
    """Nobody was admitted before a long answer of another request had ended."""
    s = Scheduler(MemoryPool(2 * LAYERS * 10_000), num_layers=LAYERS, max_running=256)
    s.add(answering := sequence(0, [1] * 100, is_whole=True, max_tokens=900))
    s.schedule(256, is_decode_due=True)
    s.add(large := sequence(1, [2] * 9050, is_whole=True))
    large.times_passed = MAX_TIMES_PASSED
    order, longest, last, num_before = 2, 0, 0, 0
    for step in range(4000):
        while len(s.waiting) < 20:
            s.add(sequence(order, [order] * 100, is_whole=True, max_tokens=20))
            order += 1
        num_running, num_ended = len(s.running), order - len(s.sequences)
        plan = s.schedule(256, is_decode_due=step % 2 == 0)
        if len(s.running) > num_running or num_ended > num_before:
            longest, last, num_before = max(longest, step - last), step, num_ended
        s.commit(plan, drawn(s, plan))
        if large.state is not State.WAITING:
            break
    assert large.state is not State.WAITING
    assert answering.state is State.FINISHED
    assert longest < 100
    assert order > 100


@pytest.mark.parametrize(("own", "others"), [(0, 0), (0, -1), (5, 0)])
def test_priorities_put_no_key_before_another(own: int, others: int) -> None:
    """A key that sent a lower number was served for ever, and the other one never."""
    s = Scheduler(MemoryPool(2 * test_scheduler.LAYERS * 1000), num_layers=8, max_running=64)
    rng, order = Random(0), 0

    def add(tenant: bytes, priority: int) -> LiveSequence:
        nonlocal order
        made = of(tenant, test_scheduler.sequence(order, 600, None, 20, priority=priority))
        order += 1
        s.add(made)
        return made

    add(BOB, others)
    s.schedule(200, is_decode_due=True, portion=SHARED)
    waiting = add(ALICE, own)
    for _ in range(2000):
        while sum(each.request.tenant == BOB for each in s.waiting) < 2:
            add(BOB, others)
        plan = s.schedule(200, is_decode_due=rng.random() < 0.5, portion=SHARED)
        s.commit(plan, test_scheduler.perform(s, plan, rng, 0.0))
        if waiting.state is not State.WAITING:
            return
    raise AssertionError("never admitted")


def test_one_whose_filter_chose_much_is_admitted_again() -> None:
    """Its key's short requests kept it from a quarter of the memory that others are left with."""
    capacity = 2 * LAYERS * 10_000
    s = Scheduler(
        MemoryPool(capacity), num_layers=LAYERS, max_running=64, cache_units=capacity // 2
    )
    s.add(large := sequence(0, [7] * 7300, tenant=ALICE, limit=7300, max_tokens=50))
    rng, order = Random(0), 1
    for step in range(3000):
        order = keep_short_ones(s, large, {ALICE: 8, BOB: 4}, rng, order)
        plan = s.schedule(512, is_decode_due=step % 2 == 0, portion=SHARED)
        s.commit(plan, drawn(s, plan))
        if large.chosen is not None and large.state is not State.WAITING:
            return
    raise AssertionError(f"overtaken {large.times_passed} times")


def test_questions_that_were_overtaken_before_their_turn_still_share_a_pass() -> None:
    """After a burst each of them read the document itself, just when time was short."""
    s, memory = cached(200_000)
    rng = Random(0)
    rng.random = lambda: 0.9  # type: ignore[method-assign]  # nothing fails
    questions = [sequence(10 + i, [7] * 4000 + [100 + i] * 12) for i in range(4)]
    for question in questions:
        question.times_passed = MAX_TIMES_PASSED + 16
        s.add(question)
    read = dict.fromkeys((question.order for question in questions), 0)
    while not s.is_idle:
        plan = s.schedule(128, is_decode_due=True)
        if plan.chunk is not None and plan.chunk.is_filter:
            read[plan.chunk.sequence] += plan.chunk.count
        s.commit(plan, test_document_cache.perform(s, plan, memory, rng))
    assert [*read.values()] == [4012, 12, 12, 12]


def test_one_that_is_led_is_known_to_be_behind_one_that_lacks_memory() -> None:
    """It was refused as late, though another's pass was reading its document."""
    s = Scheduler(MemoryPool(100_000), num_layers=LAYERS, max_running=64, cache_units=50_000)
    s.add(sequence(0, [7] * 4000 + [1] * 12))
    s.schedule(64, is_decode_due=True)
    s.add(large := sequence(1, [3] * 5500, is_whole=True))
    large.times_passed = MAX_TIMES_PASSED
    led = sequence(2, [7] * 4000 + [2] * 12)
    s.add(led := LiveSequence(replace(led.request, begin_within_s=10.0), 2))
    s.schedule(64, is_decode_due=True)
    assert large.state is State.WAITING
    assert s.is_led(led)


def test_a_change_of_the_cache_compares_waiting_prompts_with_what_is_new_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """128 waiting ones and 1,000 documents behind one system prompt: half a second a step."""
    s, memory = cached(2_000_000)
    system = [9] * 300
    for order in range(30):
        s.add(sequence(order, system + [order] * 700))
        finish(s, memory)
    waiting = [sequence(100 + i, system + [i] * 800) for i in range(10)]
    assert [find_cached(s.cache, each)[1] for each in waiting] == [1000] * 10
    compared = 0
    compare = num_common

    def counting(one: object, other: object) -> int:
        nonlocal compared
        compared += 1
        return compare(one, other)  # type: ignore[arg-type]

    s.add(sequence(50, system + [50] * 700))
    finish(s, memory)
    s.add(sequence(51, system + [3] * 800 + [51] * 300))
    finish(s, memory)
    monkeypatch.setattr("gemserve.engine.cache.document_cache.num_common", counting)
    assert [find_cached(s.cache, each)[1] for each in waiting] == [1000] * 3 + [1092] + [1000] * 6
    # one has lost what it had found, as the beginning of a longer document
    assert compared <= 2 * len(waiting) + 31


def test_those_who_wait_are_looked_at_again_only_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once 80 waited, half of the engine's time went into it, and so ever more waited."""
    s = Scheduler(MemoryPool(60_000), num_layers=LAYERS, max_running=64, cache_units=50_000)
    memory = FakeMemory(60_000)
    for order in range(11):
        s.add(sequence(order, [order] * 1000))
    looked_at: list[int] = []
    needed = RequestMemory.needed

    def counting(self: RequestMemory, waiting: LiveSequence, *rest: object) -> object:
        looked_at.append(waiting.order)
        return needed(self, waiting, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestMemory, "needed", counting)
    s.schedule(64, is_decode_due=True)
    s.schedule(64, is_decode_due=True)
    looked_at.clear()
    for _ in range(5):
        s.schedule(64, is_decode_due=True)
    assert not looked_at
    s.add(sequence(20, [20] * 100))
    s.schedule(64, is_decode_due=True)
    assert 20 in looked_at
    assert s.sequences[20].state is not State.WAITING
    s.schedule(64, is_decode_due=True)
    looked_at.clear()
    s.finish(s.sequences[0])
    s.schedule(64, is_decode_due=True)
    assert looked_at
    monkeypatch.undo()
    finish(s, memory)


def test_a_prompt_that_lacks_memory_is_admitted_beside_pinned_documents() -> None:
    """What pins keep was counted as room for others, so these took all that became free."""
    capacity = 160_000
    s = Scheduler(MemoryPool(capacity), num_layers=LAYERS, max_running=256, cache_units=80_000)
    pinned = sequence(0, [7] * 7000)
    s.add(LiveSequence(replace(pinned.request, documents=("a",), pin=True), 0))
    finish(s, FakeMemory(capacity))
    assert s.cache.pinned > 0.2 * capacity
    large, order = sequence(1, [5] * 6900, is_whole=True, max_tokens=50), 2
    for step in range(1500):
        if step == 100:
            s.add(large)
        others = [q for q in s.sequences.values() if q is not large]
        for _ in range(14 - len(others)):
            s.add(sequence(order, [order] * 300, is_whole=True, max_tokens=20))
            order += 1
        plan = s.schedule(256, is_decode_due=step % 2 == 0)
        s.commit(plan, drawn(s, plan))
        if step >= 100 and large.state is not State.WAITING:
            return
    raise AssertionError(f"overtaken {large.times_passed} times")


@pytest.mark.parametrize(
    ("share", "of_alice", "of_bob"), [(0.6, 2, 30), (0.7, 2, 20), (0.8, 4, 12), (0.9, 8, 1)]
)
def test_a_prompt_larger_than_its_key_s_part_is_admitted_beside_small_ones(
    share: float, of_alice: int, of_bob: int
) -> None:
    """Its own key's small ones always held some of its part, so that nobody left it room."""
    s = Scheduler(MemoryPool(2 * LAYERS * 10_000), num_layers=LAYERS, max_running=64)
    large = sequence(0, [7] * int(10_000 * share), tenant=ALICE, is_whole=True, max_tokens=50)
    rng, order = Random(0), 1
    for step in range(2500):
        if step == 200:
            s.add(large)
        order = keep_short_ones(s, large, {ALICE: of_alice, BOB: of_bob}, rng, order)
        plan = s.schedule(512, is_decode_due=step % 2 == 0, portion=SHARED)
        s.commit(plan, drawn(s, plan))
        if step >= 200 and large.state is not State.WAITING:
            return
    raise AssertionError(f"overtaken {large.times_passed} times")


def test_one_that_has_just_come_is_looked_at_however_many_wait() -> None:
    """It waited for its turn to be looked at, up to 30 steps, though there was room for it."""
    s = Scheduler(MemoryPool(480_000), num_layers=LAYERS, max_running=128, cache_units=400_000)
    for order in range(64):
        s.add(sequence(order, [order] * 8000))
    for _ in range(3):
        s.schedule(64, is_decode_due=False)
    assert len(s.waiting) > 50
    s.add(short := sequence(999, [99] * 100))
    s.schedule(64, is_decode_due=False)
    assert short.state is not State.WAITING


@pytest.mark.parametrize(("ahead", "leaves", "most"), [(4, 0, 80), (40, 0, 80), (40, 1, 36)])
def test_open_passes_end_before_others_begin_however_many_wait(
    ahead: int, leaves: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many in front, it was looked at now and then, and new chunks began in its way.

    `leaves`: so many of those in front are cancelled in each step.
    """
    s = Scheduler(MemoryPool(480_000), num_layers=LAYERS, max_running=64, cache_units=400_000)
    for order in range(4):
        s.add(sequence(order, [order] * 8000))
    plan = s.schedule(64, is_decode_due=False)
    s.commit(plan, StepOutput(is_chunk_done=False))
    for order in range(10, 10 + ahead):  # they wait for their turn
        s.add(sequence(order, [order] * 8000))
    s.add(small := sequence(999, [99] * 100))
    allocate = RequestMemory.allocate

    def in_the_way(self: RequestMemory, waiting: LiveSequence, *rest: object) -> object:
        if waiting is small and any(running.open_tokens for running in s.running):
            return None
        return allocate(self, waiting, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestMemory, "allocate", in_the_way)
    left: dict[int, int] = {}
    for _ in range(most):
        for each in s.waiting[:leaves]:
            s.finish(each)
        plan = s.schedule(64, is_decode_due=False)
        if small.state is not State.WAITING:
            return
        assert plan.chunk is not None
        number = plan.chunk.sequence
        left[number] = left.get(number, 30) - 1  # steps of a chunk
        s.commit(plan, StepOutput(is_chunk_done=left[number] == 0))
        if not left[number]:
            del left[number]
    raise AssertionError("it still waits")
