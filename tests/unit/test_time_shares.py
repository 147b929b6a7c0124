"""How decode steps, and the time between them, are divided between API keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from gemserve.engine.scheduling.pace import Crowd, Pace
from gemserve.engine.scheduling.time_shares import (
    PRESENT_S,
    SHARED_STEP_S,
    Portion,
    Presence,
    StepTimes,
    TenantLoad,
    TimeTurns,
    divide,
)
from gemserve.engine.sequence.sequence import LiveSequence, State
from tests.unit.test_fair_shares import ALICE, BOB, EVE, of, scheduler, step
from tests.unit.test_scheduler import sequence

FIXED_S, ROW_S = 0.002, 0.001  # of a step, about as on a processor
READING = 1.7


def seconds_of(num_rows: int) -> float:
    return FIXED_S + ROW_S * num_rows


def reading_of(load: TenantLoad) -> float:
    return READING if load.unread else 0.0


def taken_s(loads: list[TenantLoad], portion: Portion) -> float:
    """Of a decode step, on average."""
    rows = {load.tenant: min(load.decoding, portion.rows) for load in loads}
    alone_s, joined_s = seconds_of(rows.get(portion.least, 0)), seconds_of(sum(rows.values()))
    return alone_s + portion.joined * (joined_s - alone_s)


@pytest.mark.parametrize("choices", [1, 8, 96, 256])
def test_a_stream_beside_another_key_s_choices_keeps_half_of_its_pace(choices: int) -> None:
    """96 choices of one key made each token of another one's stream take 40 times as long."""
    loads = [TenantLoad(choices, 0, ALICE), TenantLoad(1, 0, BOB)]
    portion = divide(loads, seconds_of, reading_of)
    assert taken_s(loads, portion) <= 2 * seconds_of(1) + 1e-9


def test_no_key_falls_below_its_part_whatever_the_others_do() -> None:
    """The bound on a cycle holds for all whose streams have a place in every step."""
    numbers = [0, 1, 2, 7, 40]
    kinds = [TenantLoad(*each) for each in itertools.product(numbers, numbers) if any(each)]
    loads: Iterable[TenantLoad]
    for loads in itertools.chain(
        itertools.product(kinds, repeat=2), itertools.combinations(kinds[::3], 3)
    ):
        loads = [replace(load, tenant=b"%d" % place) for place, load in enumerate(loads)]
        portion = divide(loads, seconds_of, reading_of)
        assert portion.rows >= 1
        decoding = [load for load in loads if load.decoding]
        if not decoding or portion.reading_s is None:
            continue
        step_s = taken_s(loads, portion)
        assert step_s <= max(SHARED_STEP_S, len(loads) * seconds_of(1)) + 1e-9
        cycle_s = step_s + (portion.reading_s if any(load.unread for load in loads) else 0.0)
        alone_s = min(
            seconds_of(load.decoding) * (1 + reading_of(load))
            for load in decoding
            if load.decoding <= portion.rows
            or load == min(decoding, key=lambda each: each.decoding)
        )
        assert cycle_s <= 1.25 * len(loads) * alone_s + 1e-9


def test_prompts_of_another_key_take_no_more_than_its_part_of_a_stream_s_time() -> None:
    portion = divide([TenantLoad(0, 2), TenantLoad(1, 0)], seconds_of, reading_of)
    assert portion.reading_s == pytest.approx(seconds_of(1))


def test_a_key_with_far_more_to_do_has_half_as_much_time() -> None:
    """With as much, another key's stream had 0.4 of its pace: what reading costs besides its time,
    such as cold caches, comes on top."""
    portion = divide([TenantLoad(0, 8), TenantLoad(1, 0)], seconds_of, reading_of)
    assert portion.reading_s == pytest.approx(seconds_of(1) / 2)


def test_a_key_s_own_prompts_are_read_beside_its_stream_as_if_it_were_alone() -> None:
    """They got half of what was read, whatever else the other key had of the same time."""
    few, many = TenantLoad(1, 1, BOB), TenantLoad(0, 8, ALICE)
    portion = divide([many, few], seconds_of, reading_of)
    own_s = READING * seconds_of(1)
    assert portion.reading_of[BOB] == pytest.approx(own_s)
    assert portion.reading_of[ALICE] == pytest.approx((seconds_of(1) + own_s) / 2)
    beside_rows = divide([TenantLoad(8, 8, ALICE), few], seconds_of, reading_of)
    assert beside_rows.reading_of[BOB] == pytest.approx(own_s)
    assert beside_rows.reading_of[ALICE] < portion.reading_of[ALICE]  # its rows take time, too


def test_equal_keys_are_read_equally_long() -> None:
    portion = divide([TenantLoad(1, 1, BOB), TenantLoad(1, 1, ALICE)], seconds_of, reading_of)
    assert portion.reading_of == pytest.approx(
        {BOB: READING * seconds_of(1), ALICE: READING * seconds_of(1)}
    )


def test_nobody_is_left_out_where_steps_take_as_long_with_many_as_with_one() -> None:
    """On a GPU, leaving rows out would gain nothing and lose the others' tokens."""
    portion = divide(
        [TenantLoad(96, 0), TenantLoad(1, 0)], lambda rows: 0.01 + 1e-6 * rows, reading_of
    )
    assert portion.rows == 96
    assert portion.joined >= 0.99


def dear(num_rows: int) -> float:
    """Steps on a processor whose second row takes nearly as long as its first one."""
    return 0.00065 if num_rows == 1 else 0.0011 + 0.00025 * (num_rows - 2)


def test_rows_that_are_too_much_already_come_in_some_steps_only() -> None:
    """A row of another key in every step took nearly half of a stream's pace."""
    loads = [TenantLoad(96, 0, ALICE), TenantLoad(1, 0, BOB)]
    portion = divide(loads, dear, reading_of)
    assert (portion.rows, portion.least) == (1, BOB)
    assert portion.joined == pytest.approx(0.00065 / 2 / 0.00045)
    many = [of(ALICE, sequence(order, 4, None, 9)) for order in range(96)]
    one = of(BOB, sequence(99, 4, None, 9))
    turns = TimeTurns()
    taken = [turns.choose([*many, one], portion) for _ in range(1000)]
    assert all(one in some for some in taken)
    assert sum(len(some) == 2 for some in taken) == pytest.approx(722, abs=2)
    assert {s.order for some in taken for s in some} == {*range(96), 99}  # nobody is forgotten


def test_a_step_of_the_least_key_alone_is_timed_again_and_again() -> None:
    """What was learned of it once allowed ten rows where two would have been right."""
    times = StepTimes()
    for num_rows in (1, 2, 4, 8, 16):
        times.observe(num_rows, 10 * dear(num_rows))  # as the machine was before
    turns = TimeTurns()
    decoding = [of(ALICE, sequence(order, 4, None, 9)) for order in range(96)]
    decoding.append(of(BOB, sequence(99, 4, None, 9)))
    loads = [TenantLoad(96, 0, ALICE), TenantLoad(1, 0, BOB)]
    portion = divide(loads, times.seconds_of, reading_of)
    for _ in range(500):
        portion = divide(loads, times.seconds_of, reading_of)
        num_rows = len(turns.choose(decoding, portion))
        times.observe(num_rows, dear(num_rows))
    assert times.seconds_of(1) == pytest.approx(dear(1), rel=0.05)
    step_s = dear(1) + portion.joined * (dear(1 + portion.rows) - dear(1))
    assert step_s <= 1.6 * dear(1)


def test_a_key_alone_takes_short_steps_while_another_one_may_come() -> None:
    portion = divide([TenantLoad(200, 0)], seconds_of, reading_of)
    assert portion.reading_s is None
    assert seconds_of(portion.rows) <= SHARED_STEP_S < seconds_of(portion.rows + 1)


def test_sequences_that_are_left_out_take_turns() -> None:
    many = [of(ALICE, sequence(order, 4, None, 9)) for order in range(10)]
    one = of(BOB, sequence(99, 4, None, 9))
    decoding: list[LiveSequence] = [*many, one]
    turns = TimeTurns()
    taken = [turns.choose(decoding, Portion(4, None)) for _ in range(100)]
    assert all(one in some for some in taken)
    for each in many:
        places = [place for place, some in enumerate(taken) if each in some]
        assert 39 <= len(places) <= 41
        assert max(b - a for a, b in itertools.pairwise(places)) <= 3
    assert all(some == [each for each in decoding if each in some] for some in taken)


def test_a_scheduler_s_step_has_so_many_rows_of_each_key() -> None:
    s = scheduler(64)
    for order in range(12):
        s.add(of((ALICE, ALICE, BOB)[order % 3], sequence(order, 4, None, 1000)))
    while not all(each.state is State.DECODING for each in s.running) or s.waiting:
        step(s)
    plan = s.schedule(100, is_decode_due=True, portion=Portion(3, None))
    tenants = [s.sequences[row.sequence].request.tenant for row in plan.decodes]
    assert sorted(tenants) == [ALICE] * 3 + [BOB] * 3
    assert len(s.schedule(100, is_decode_due=True).decodes) == 12


def test_the_time_of_a_step_is_learned() -> None:
    times = StepTimes()
    assert times.seconds_of(3) == 0.0
    times.observe(100, seconds_of(100))
    assert times.seconds_of(50) == pytest.approx(seconds_of(100) / 2)
    for num_rows in (1, 2, 4, 8, 100):
        for _ in range(50):
            times.observe(num_rows, seconds_of(num_rows))
    for num_rows in (1, 3, 60, 100):
        assert times.seconds_of(num_rows) == pytest.approx(seconds_of(num_rows), rel=0.01)
    assert times.seconds_of(200) == pytest.approx(2 * seconds_of(100), rel=0.01)


def test_a_key_is_present_for_a_while_after_its_last_request() -> None:
    present = Presence()
    present.arrive(ALICE)
    assert not present.is_shared(0.0)
    present.arrive(BOB)
    present.arrive(BOB)
    assert present.is_shared(0.0)
    present.leave(BOB, 1.0)
    present.leave(BOB, 2.0)
    assert present.is_shared(2.0 + PRESENT_S - 0.1)
    assert not present.is_shared(2.0 + PRESENT_S)
    present.leave(ALICE, 20.0)
    assert not present.is_shared(20.0)
    present.arrive(EVE)
    assert present.is_shared(21.0)


def test_a_server_without_keys_is_one_tenant() -> None:
    present = Presence()
    for _ in range(3):
        present.arrive(b"")
    assert not present.is_shared(0.0)


def test_what_was_read_beyond_a_portion_counts_for_the_next_ones() -> None:
    """A pass pauses at its own places only, so a slice may take as long as ten decode steps."""
    pace, portion = Pace(0.25), Portion(1, 0.004)
    crowd = Crowd(1, 5, portion)
    pace.observe_slice(0.02, portion)
    for _ in range(5):
        assert pace.is_decode_due(crowd)
        pace.observe_decode(0.003, 1, portion)
    assert not pace.is_decode_due(crowd)
    assert pace.slice_s(crowd) == pytest.approx(0.004)
    pace.observe_slice(5.0)  # with one tenant
    pace.observe_decode(0.003, 1, portion)
    assert not pace.is_decode_due(crowd)
