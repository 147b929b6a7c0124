"""Slots and reading time are shared between API keys."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from gemserve.engine.memory import MemoryPool
from gemserve.engine.reuse.lookup import MAX_TIMES_PASSED
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.scheduling.time_shares import Portion
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Chunk, StepOutput
from tests.unit.test_scheduler import LAYERS, perform, random_sequence, sequence

ALICE, BOB, EVE = b"alice", b"bob", b"eve"


def of(tenant: bytes, made: LiveSequence) -> LiveSequence:
    return LiveSequence(replace(made.request, tenant=tenant), made.order)


def scheduler(max_running: int) -> Scheduler:
    return Scheduler(MemoryPool(1 << 24), num_layers=LAYERS, max_running=max_running)


def step(s: Scheduler) -> Chunk | None:
    """Run one step in which nothing ends; the chunk that was read."""
    plan = s.schedule(100, is_decode_due=False)
    tokens = {row.sequence: [1] for row in plan.decodes}
    if plan.chunk is not None:
        tokens[plan.chunk.sequence] = [1]
    s.commit(plan, StepOutput(is_chunk_done=True, tokens=tokens))
    s.check_integrity()
    return plan.chunk


def running_of(s: Scheduler, tenant: bytes) -> int:
    return sum(each.request.tenant == tenant for each in s.running)


def test_one_key_s_choices_leave_slots_for_the_next_key() -> None:
    """Three requests with n = 128 held all slots, and another key's short one was not answered."""
    s = scheduler(256)
    for order in range(384):
        s.add(of(ALICE, sequence(order, 4, None, 1000)))
    step(s)
    assert running_of(s, ALICE) == 192
    late = of(BOB, sequence(999, 4, None, 8))
    s.add(late)
    step(s)
    assert late.state is not State.WAITING


def test_one_key_s_overtaken_requests_leave_memory_too() -> None:
    """Each of them took of what others are left with, until the next key had to wait for them."""
    units = 2 * LAYERS * 100
    s = Scheduler(MemoryPool(10 * units), num_layers=LAYERS, max_running=64)
    for order in range(12):
        s.add(overtaken := of(ALICE, sequence(order, 90, None, 10)))
        overtaken.times_passed = MAX_TIMES_PASSED
    s.schedule(100, is_decode_due=False, portion=Portion(8, None))
    assert running_of(s, ALICE) == 8  # seven are its part
    late = of(BOB, sequence(99, 90, None, 10))
    s.add(late)
    s.schedule(100, is_decode_due=False, portion=Portion(8, None))
    assert late.state is not State.WAITING


def test_without_keys_all_slots_are_used() -> None:
    s = scheduler(8)
    for order in range(20):
        s.add(sequence(order, 4, None, 1000))
    step(s)
    assert len(s.running) == 8


def test_a_key_may_always_have_one_slot() -> None:
    s = scheduler(1)
    s.add(of(ALICE, sequence(0, 4, None, 9)))
    step(s)
    assert len(s.running) == 1


def test_one_key_s_prompts_leave_memory_for_the_next_key() -> None:
    """Long prompts of one key held all memory, and another key's short one waited for their end."""
    units = 2 * LAYERS * 100
    s = Scheduler(MemoryPool(10 * units), num_layers=LAYERS, max_running=64)
    for order in range(12):
        s.add(of(ALICE, sequence(order, 90, None, 10)))
    s.schedule(100, is_decode_due=False, portion=Portion(8, None))
    assert running_of(s, ALICE) == 7
    late = of(BOB, sequence(99, 90, None, 10))
    s.add(late)
    s.schedule(100, is_decode_due=False, portion=Portion(8, None))
    assert late.state is not State.WAITING
    s.schedule(100, is_decode_due=False)  # nobody else has been there for a while
    assert len(s.running) == 10
    s.check_integrity()


def test_a_key_s_only_request_may_have_all_memory() -> None:
    s = Scheduler(MemoryPool(2 * LAYERS * 100), num_layers=LAYERS, max_running=64)
    s.add(of(ALICE, sequence(0, 90, None, 10)))
    s.schedule(100, is_decode_due=False, portion=Portion(8, None))
    assert running_of(s, ALICE) == 1


def test_slots_are_given_in_turn_whatever_priority_says() -> None:
    """Any key may send the best priority: it orders that key's own requests."""
    s = scheduler(10)
    for order in range(20):
        s.add(of(ALICE, sequence(order, 4, None, 1000, priority=-100)))
    for order in range(20, 40):
        s.add(of(BOB, sequence(order, 4, None, 1000, priority=100 - order)))
    step(s)
    assert (running_of(s, ALICE), running_of(s, BOB)) == (4, 4)
    admitted = {each.order for each in s.running if each.request.tenant == BOB}
    assert admitted == {36, 37, 38, 39}


def test_a_key_s_many_prompts_are_read_in_turn_with_another_s() -> None:
    s = scheduler(64)
    prompts = [of(ALICE, sequence(order, 1000 + order, None, 10_000)) for order in range(20)]
    late = of(BOB, sequence(99, 2000, None, 10_000))
    for each in [*prompts, late]:
        s.add(each)
    read = [chunk for _ in range(100) if (chunk := step(s)) is not None]
    assert late.state is State.DECODING
    last = max(index for index, chunk in enumerate(read) if chunk.sequence == late.order)
    assert last <= 3 * 20 + 2  # it has 20 chunks; it waited for all 200 others before


def test_a_key_that_waited_has_no_claim_to_what_it_missed() -> None:
    s = scheduler(64)
    for order in range(4):
        s.add(of(ALICE, sequence(order, 5000, None, 10_000)))
    for _ in range(50):
        step(s)
    s.add(of(BOB, sequence(9, 9000, None, 10_000)))
    read = [step(s) for _ in range(40)]
    share = sum(chunk is not None and chunk.sequence == 9 for chunk in read)
    assert 10 <= share <= 30


def test_random_traces_of_several_keys_end_and_leak_nothing() -> None:
    for seed in range(150):
        rng = Random(seed)
        s = Scheduler(
            MemoryPool(rng.randrange(1, 4) * 2 * LAYERS * (2**11 + 20)),
            num_layers=LAYERS,
            max_running=rng.choice((1, 2, 8, 64)),
        )
        tenants = (b"", ALICE, BOB, EVE)
        pending = [of(rng.choice(tenants), random_sequence(rng, i)) for i in range(20)]
        for _ in range(20_000):
            while pending and rng.random() < 0.4:
                s.add(pending.pop(0))
            plan = s.schedule(
                rng.choice((8, 300, 5000)),
                is_decode_due=rng.random() < 0.5,
                portion=rng.choice((None, Portion(1, None), Portion(4, None))),
            )
            assert not plan.is_empty or s.is_idle, "work waits and nothing is planned"
            s.commit(plan, perform(s, plan, rng, 0.01))
            s.check_integrity()
            if s.is_idle and not pending:
                break
        else:
            raise AssertionError(f"trace {seed} did not end")
        assert s.pool.used == 0
