"""Prompts that are read whole in the document cache: who copies from whom, and who waits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import StepOutput
from tests.unit.test_document_cache import (
    ALL_GROW,
    LAYERS,
    FakeAdapter,
    FakeMemory,
    finish,
    perform,
)
from tests.unit.test_document_cache import sequence as filtered
from tests.unit.test_document_cache_pins import stored
from tests.unit.test_document_cache_waiting import step

DOCUMENT = [7] * 1000
UNITS = 2 * LAYERS


def sequence(order: int, ids: list[int], **more: object) -> LiveSequence:
    return filtered(order, ids, is_whole=True, **more)  # type: ignore[arg-type]


def cached(capacity: int = 200_000, cache_units: int = 100_000) -> tuple[Scheduler, FakeMemory]:
    pool = MemoryPool(capacity)
    s = Scheduler(pool, num_layers=LAYERS, max_running=8, cache_units=cache_units)
    return s, FakeMemory(capacity)


def read_until(s: Scheduler, memory: FakeMemory, one: LiveSequence, state: State) -> None:
    for _ in range(100):
        if one.state is state:
            return
        step(s, memory)
    raise AssertionError(one.state)


def test_a_second_prompt_is_copied_while_the_first_is_answered() -> None:
    s, memory = cached()
    s.add(first := sequence(0, DOCUMENT + [1] * 10, max_tokens=500))
    read_until(s, memory, first, State.DECODING)
    s.add(second := sequence(1, DOCUMENT + [2] * 10))
    step(s, memory)
    assert (second.num_reused, second.state) == (1000, State.PREFILLING)
    assert s.cache.used == 0
    finish(s, memory)
    # the second one ends first, and the other adds too little to it
    assert s.cache.used == 1010 * UNITS


def test_prompts_at_once_wait_for_the_first() -> None:
    s, memory = cached()
    for order in range(4):
        s.add(sequence(order, DOCUMENT + [order] * 10))
    plans = finish(s, memory)
    assert sum(plan.chunk.count for plan in plans if plan.chunk) == 1010 + 3 * 10
    assert max(len(plan.copies) for plan in plans) == 1


def test_a_document_of_all_layers_and_one_of_some_are_two() -> None:
    s, memory = cached()
    for order, make in enumerate((sequence, filtered, sequence, filtered)):
        s.add(made := make(order, DOCUMENT + [order] * 10))
        finish(s, memory)
        assert (made.num_reused or made.num_cached) == (1000 if order > 1 else 0)
    assert s.cache.used == 1010 * UNITS + 1010 * 5


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("other", ["tenant", "adapter", "version"])
def test_nothing_is_shared_across(other: str, is_running: bool) -> None:
    s, memory = cached()
    s.add(first := sequence(0, DOCUMENT, tenant=b"a", adapter=FakeAdapter("x", "1")))
    read_until(s, memory, first, State.DECODING)
    if not is_running:
        finish(s, memory)
    adapter = FakeAdapter("y" if other == "adapter" else "x", "12"[other == "version"])
    s.add(sequence(1, DOCUMENT, tenant=b"b" if other == "tenant" else b"a", adapter=adapter))
    finish(s, memory)
    assert s.cache.counts.hits == 0


def test_without_a_cache_nothing_is_copied() -> None:
    """A model whose rotary embedding depends on length has none: no two prompts' keys are alike."""
    s, memory = cached(cache_units=0)
    s.add(first := sequence(0, DOCUMENT, max_tokens=100))
    read_until(s, memory, first, State.DECODING)
    s.add(second := sequence(1, DOCUMENT))
    plans = finish(s, memory)
    assert second.num_reused == 0
    assert not any(plan.copies for plan in plans)


def test_a_forgotten_document_is_not_copied_from_a_running_request() -> None:
    s, memory = cached()
    s.add(first := stored(sequence(0, DOCUMENT, max_tokens=100), "a"))
    read_until(s, memory, first, State.DECODING)
    s.forget_documents({"a"})
    s.add(second := sequence(1, DOCUMENT))
    finish(s, memory)
    assert second.num_reused == 0
    assert "a" not in s.cache.stored()


def test_a_copy_of_a_stored_document_is_private_too() -> None:
    """Its memory would not be overwritten when it becomes free."""
    s, memory = cached()
    s.add(first := stored(sequence(0, DOCUMENT, max_tokens=100), "a"))
    read_until(s, memory, first, State.DECODING)
    s.add(second := sequence(1, [*DOCUMENT, 1]))
    step(s, memory)
    assert second.memory.is_private


def test_a_request_keeps_as_much_as_its_prompt() -> None:
    s, memory = cached()
    s.add(sequence(0, [7] * 300, max_tokens=500))
    finish(s, memory)
    assert s.cache.used == 300 * UNITS
    assert s.pool.used == s.cache.used


def test_a_scored_prompt_takes_nothing_over() -> None:
    s, memory = cached()
    made = sequence(1, DOCUMENT + [1] * 10)
    scored = LiveSequence(replace(made.request, prompt_logprobs=0), made.order)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.add(scored)
    finish(s, memory)
    assert scored.num_reused == 0


def test_full_memory_gives_up_a_document_before_it_moves_many_times_its_size() -> None:
    """Where every gap is small, each request moved most of the pool."""
    s, memory = cached(capacity=84_000, cache_units=84_000)
    for order in range(10):
        s.add(filtered(order, [order] * 1600))  # 8,000 units each
        finish(s, memory)
    spans = sorted(document.spans[0].start for document in s.cache.documents)
    assert len(spans) == 10
    for document in [d for d in s.cache.documents if int(d.tokens[0]) in (0, 9)]:
        s.cache._drop(document)
    assert s.pool.num_moved(16_000) == 8 * 8_000
    s.add(filtered(11, [99] * 3200))
    plan = s.schedule(256, is_decode_due=True)
    assert not plan.moves
    assert s.cache.counts.evictions == 1


def test_the_same_prompt_again_computes_its_last_token() -> None:
    """Its logits are needed. A pass over nothing would never end."""
    s, memory = cached()
    for order in range(2):
        s.add(made := sequence(order, DOCUMENT))
        finish(s, memory)
    assert made.num_reused == 999


@pytest.mark.parametrize("is_whole", [True, False])
def test_five_clients_that_give_up_cost_one_pass(is_whole: bool) -> None:
    """A tool sends a request again when it has waited for too long, and gives up again."""
    s, memory = cached()
    prompt = [7] * 1600
    for order in range(4):
        s.add(made := filtered(order, prompt, is_whole=is_whole))
        step(s, memory)
        assert made.done == 256 * (order + 1)
        s.finish(made)
        s.check_integrity()
    s.add(made := filtered(4, prompt, is_whole=is_whole))
    plans = finish(s, memory)
    assert (made.num_reused if is_whole else made.num_cached) == 4 * 256
    reading = [p.chunk for p in plans if p.chunk is not None and p.chunk.is_filter != is_whole]
    assert sum(chunk.count for chunk in reading) == 1600 - 4 * 256


def test_half_a_prompt_that_fails_is_not_kept() -> None:
    s, memory = cached()
    s.add(made := sequence(0, DOCUMENT))
    step(s, memory)
    assert made.state is State.PREFILLING
    s.finish(made, has_failed=True)
    assert s.pool.used == s.cache.used == 0


def test_half_a_prompt_is_not_copied() -> None:
    """It is not worth waiting for one that has so much left to read."""
    s, memory = cached()
    s.add(first := sequence(0, [7] * 300 + [1] * 3000))
    step(s, memory)
    s.add(second := sequence(1, [7] * 300 + [2] * 500))
    step(s, memory)
    assert (first.state, second.state) == (State.PREFILLING, State.PREFILLING)
    assert second.num_reused == 0
    finish(s, memory)


def test_a_failed_prompt_is_not_kept() -> None:
    s, memory = cached()
    s.add(made := sequence(0, DOCUMENT, max_tokens=100))
    read_until(s, memory, made, State.DECODING)
    s.commit(s.schedule(64, is_decode_due=True), StepOutput(failures=frozenset({made.order})))
    assert s.pool.used == s.cache.used == 0


@pytest.mark.parametrize("changes", [{"evicts": True}, {"chosen": tuple(range(500))}])
def test_what_is_not_answered_from_the_whole_prompt_takes_nothing_over(
    changes: dict[str, object],
) -> None:
    """An evictor has to see queries of the whole prompt, and then drops keys and values."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    made = sequence(1, DOCUMENT)
    plan = made.plan.having(num_kept=500, **changes)
    s.add(other := LiveSequence(replace(made.request, plan=plan), 1))
    assert (other.cache_key, other.is_whole) == (None, False)
    s.schedule(64, is_decode_due=True)
    assert (other.num_reused, s.cache.counts.hits) == (0, 0)


def test_after_a_fallback_other_tokens_are_in_common() -> None:
    """A repeated question is read by the filter pass alone."""
    repeating = [filtered(order, DOCUMENT) for order in range(2)]
    for made in repeating:
        plan = made.plan.having(repeated=(1, 2), rows=(1000, 1001))
        made.request = replace(made.request, plan=plan)
    one, other = repeating
    assert (one.num_common_with(other), len(one.tokens)) == (1000, 1002)
    for made in repeating:
        made.chosen, made.num_kept = range(1000), 1000
    assert (one.num_common_with(other), len(one.tokens)) == (999, 1000)


def test_a_choice_has_less_in_common_than_the_whole_prompt() -> None:
    """What was counted for the whole prompt counted for what was chosen, too: the answer was drawn
    from another prompt's text, and no error said so."""
    made = [filtered(order, [*DOCUMENT, order]) for order in range(2)]
    for each in made:
        plan = each.plan.having(num_stable=300, may_read_whole=True)
        each.request = replace(each.request, plan=plan)
    one, two = made
    one.chosen, one.ids, one.num_kept = range(400), DOCUMENT[:400], 400
    two.read_whole()
    assert two.num_common_with(one) == 400
    two.read_filtered()
    two.chosen, two.num_kept = range(600), 600
    two.ids = [*DOCUMENT[:300], *[8] * 300]
    assert two.begins_alike
    assert two.num_common_with(one) == 300


def test_the_document_that_is_copied_does_not_give_way_to_spare_moves() -> None:
    s, memory = cached(capacity=84_000, cache_units=84_000)
    for order in range(10):
        s.add(filtered(order, [order] * 1600))
        finish(s, memory)
    for document in [d for d in s.cache.documents if int(d.tokens[0]) in (1, 9)]:
        s.cache._drop(document)
    s.add(made := filtered(11, [0] * 1600 + [99] * 3200))
    plan = s.schedule(256, is_decode_due=True)
    assert (made.num_cached, s.cache.counts.evictions) == (1600, 1)
    assert not plan.moves


def test_a_copy_is_made_from_where_compaction_has_put_its_document() -> None:
    """The next prompt to be admitted moved memory, and the copy read where its document had been.

    What it read there could be another key's, and its answer was silently wrong.
    """
    s, memory = cached(capacity=60_000, cache_units=30_000)
    gap = s.pool.allocate(3000)
    assert gap is not None
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.pool.release(gap)
    s.add(copying := sequence(1, DOCUMENT + [1] * 10))
    free = s.pool.free - copying.reserved_units(ALL_GROW)
    s.add(moving := sequence(2, [9] * (free // UNITS - 7)))
    plan = s.schedule(256, is_decode_due=True)
    assert (s.running, len(plan.copies)) == ([copying, moving], 1)
    assert len(plan.moves) == 3  # of the cached prompt: its rows, then itself; and of the copy
    s.commit(plan, perform(s, plan, memory, Random(1)))
    finish(s, memory)
    assert len(copying.generated) == 4
