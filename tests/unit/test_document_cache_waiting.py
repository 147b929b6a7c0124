"""Who waits for another's filter pass, what waiting costs, and which documents give way."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest

from gemserve.contract.filter_plan import Budget
from gemserve.engine.cache.common_tokens import as_tokens, num_common
from gemserve.engine.memory import MemoryPool, MemoryShare
from gemserve.engine.reuse.lookup import MAX_TIMES_PASSED, MOST_SHARES, find_cached
from gemserve.engine.scheduling.admission import MOST_READING
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.scheduling.time_shares import Portion
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import StepOutput
from gemserve.kv_layout import KVLayout
from tests.unit.test_document_cache import (
    LAYERS,
    FakeMemory,
    cached,
    finish,
    perform,
    sequence,
)
from tests.unit.test_fair_shares import ALICE, BOB, of
from tests.unit.test_scheduler import kept_of

DOCUMENT = [7] * 1000


def with_priority(made: LiveSequence, priority: int) -> LiveSequence:
    return LiveSequence(replace(made.request, priority=priority), made.order)


def step(s: Scheduler, memory: FakeMemory) -> None:
    plan = s.schedule(256, is_decode_due=True)
    s.check_integrity()
    rng = Random(0)
    rng.random = lambda: 0.9  # type: ignore[method-assign]  # nothing fails
    s.commit(plan, perform(s, plan, memory, rng))
    s.check_integrity()


def test_a_short_common_beginning_is_not_waited_for() -> None:
    """One system prompt before everybody's own document held up all but one filter pass."""
    s, memory = cached()
    for order in range(3):
        s.add(sequence(order, [7] * 300 + [order] * 2000))
    step(s, memory)
    assert [made.state for made in s.running] == [State.FILTERING] * 3


def test_nobody_waits_for_a_pass_of_lower_priority() -> None:
    """Passes of higher priority may hold that one up for any time."""
    s, memory = cached()
    s.add(with_priority(sequence(0, DOCUMENT + [1] * 10), 5))
    step(s, memory)
    urgent = with_priority(sequence(1, DOCUMENT + [2] * 10), 0)
    s.add(urgent)
    step(s, memory)
    assert urgent.state is State.FILTERING


def test_nobody_waits_for_what_will_not_be_kept() -> None:
    """A pass that adds less than the least that is worth it to a cached document is not stored."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    for order in (1, 2):
        s.add(sequence(order, DOCUMENT + [8] * 100 + [order] * 10))
    step(s, memory)
    step(s, memory)
    assert not s.waiting


def test_a_pass_that_adds_little_to_a_pinned_document_is_waited_for() -> None:
    """What it shares counted as new, and there seemed to be no room to keep what it reads."""
    s = Scheduler(MemoryPool(40_000), num_layers=LAYERS, max_running=8, cache_units=12_000)
    memory = FakeMemory(40_000)
    first = sequence(0, DOCUMENT)
    s.add(LiveSequence(replace(first.request, pin=True), 0))
    finish(s, memory)
    assert (s.cache.pinned, s.cache.has_room(7_001)) == (5000, False)
    s.add(sequence(1, DOCUMENT + [8] * 700))
    step(s, memory)
    s.add(waiting := sequence(2, DOCUMENT + [8] * 690 + [2] * 20))
    step(s, memory)
    assert waiting.state is State.WAITING
    finish(s, memory)
    assert waiting.num_cached >= 1690


def test_one_that_was_overtaken_often_waits_for_no_other() -> None:
    s, memory = cached()
    s.add(sequence(0, DOCUMENT + [1] * 10))
    step(s, memory)
    patient = sequence(1, DOCUMENT + [2] * 10)
    patient.times_passed_led = MAX_TIMES_PASSED
    s.add(patient)
    step(s, memory)
    assert patient.state is State.FILTERING


@pytest.mark.parametrize("other", ["tenant", "layer"])
def test_nobody_waits_for_a_pass_that_leaves_nothing_for_them(other: str) -> None:
    """Across tenants, the wait alone would tell what another's prompt begins with."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT + [1] * 10, tenant=b"a"))
    step(s, memory)
    tenant, layer = (b"b", 2) if other == "tenant" else (b"a", 3)
    made = sequence(1, DOCUMENT + [2] * 10, tenant=tenant, layer=layer)
    s.add(made)
    step(s, memory)
    assert made.state is State.FILTERING


def test_waiting_for_one_another_keeps_no_ended_request_alive() -> None:
    """Each request remembered the one that it had waited for, which remembered the one before."""
    s, memory = cached()
    for order in range(7000, 7005):
        s.add(last := sequence(order, DOCUMENT + [order] * 10))
    finish(s, memory)
    gc.collect()
    alive = [made for made in gc.get_objects() if type(made) is LiveSequence]
    assert [made.order for made in alive if 7000 <= made.order < 7005] == [last.order]


def test_many_long_prompts_that_wait_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step compared each waiting prompt with each document: 0.4 s for 128 of 128K tokens."""
    capacity = 20_000_000
    s = Scheduler(
        MemoryPool(capacity), num_layers=LAYERS, max_running=300, cache_units=capacity // 2
    )
    document = [Random(1).randrange(9) for _ in range(40_000)]
    span = s.pool.allocate(5 * len(document))
    leader = sequence(0, document + [1] * 400)
    assert span is not None
    key = leader.cache_key
    assert key is not None
    share = MemoryShare(span, len(document), len(document))
    s.cache.add(key, as_tokens(document), (share,))
    s.add(leader)
    s.schedule(64, is_decode_due=True)
    for order in range(1, 65):
        s.add(sequence(order, document + [1] * 350 + [order] * 20))
    for _ in range(20):  # each looks at some of them
        s.schedule(64, is_decode_due=True)
    assert len(s.waiting) == 64
    with monkeypatch.context() as patch:
        patch.setattr(s.cache, "find", None)
        patch.setattr("gemserve.engine.sequence.sequence.num_common", None)
        s.schedule(64, is_decode_due=True)


def test_what_was_found_is_looked_for_again_once_it_is_gone() -> None:
    """A document that has been dropped must not be copied."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    waiting = sequence(1, DOCUMENT + [1] * 300)
    assert find_cached(s.cache, waiting)[1] == 1000
    s.cache.make_room(s.pool.capacity)
    assert find_cached(s.cache, waiting) == (None, 0)
    s.add(sequence(2, DOCUMENT))
    finish(s, memory)
    assert find_cached(s.cache, waiting)[1] == 1000


def test_one_step_copies_one_document() -> None:
    """Ten questions that had waited copied a long document ten times before anybody's next token"""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT, is_whole=True))
    finish(s, memory)
    for order in range(1, 5):
        s.add(sequence(order, DOCUMENT + [order] * 10, is_whole=True))
    plans = finish(s, memory)
    assert max(len(plan.copies) for plan in plans) == 1
    assert s.cache.counts.hits == 4


def test_what_a_step_copies_is_not_evicted_in_that_step() -> None:
    """Another request admitted in the same step would be given the memory that is copied from."""
    s = Scheduler(MemoryPool(40_000), num_layers=LAYERS, max_running=8, cache_units=40_000)
    memory = FakeMemory(40_000)
    s.add(sequence(0, DOCUMENT, is_whole=True))
    finish(s, memory)
    assert s.cache.used == 16_000
    s.add(sequence(1, DOCUMENT + [1] * 10, is_whole=True))
    s.add(sequence(2, [9] * 1000, is_whole=True))  # fits only where the document is
    plan = s.schedule(256, is_decode_due=True)
    (copy,) = plan.copies
    held = [made.memory for made in s.running]
    assert all(copy.source[0].start >= m.start + m.size or m.start >= 16_000 for m in held)
    assert len(held) == 1
    s.commit(plan, perform(s, plan, memory, Random(0)))
    finish(s, memory)


def test_questions_at_once_share_the_document_s_memory() -> None:
    """Each had a copy of it, so that eight questions needed the memory of eight documents."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    for order in range(1, 1 + MOST_READING):
        s.add(sequence(order, DOCUMENT + [order] * 10))
    plan = s.schedule(256, is_decode_due=True)
    s.check_integrity()
    assert len(s.running) == MOST_READING
    assert not plan.copies
    assert s.cache.used == 5000
    # what the answers will need, and no more
    assert s.pool.used == 5000 + MOST_READING * 20 * 2 * LAYERS
    s.commit(plan, perform(s, plan, memory, Random(0)))
    finish(s, memory)
    assert s.cache.counts.hits == MOST_READING


def test_a_document_that_is_read_from_does_not_give_way() -> None:
    """Its memory would be another request's while a pass reads it."""
    s = Scheduler(MemoryPool(9_000), num_layers=LAYERS, max_running=8, cache_units=9_000)
    memory = FakeMemory(9_000)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.add(reader := sequence(1, DOCUMENT + [1] * 10))
    s.add(waiting := sequence(2, [9] * 1000))  # fits only where the document is
    plan = s.schedule(256, is_decode_due=True)
    assert (reader.num_shared, waiting.state) == (1000, State.WAITING)
    s.commit(plan, perform(s, plan, memory, Random(0)))
    finish(s, memory)
    assert len(waiting.generated) == 4


@pytest.mark.parametrize(("count", "is_shared"), [(251, True), (249, False), (1, False)])
def test_the_beginning_of_a_second_place_is_taken_over_too(count: int, is_shared: bool) -> None:
    """It counted as taken over, and was nowhere in what the pass read.

    Less than half of a place is copied: it would keep all of it from becoming free.
    """
    s, memory = cached()
    for order, more in enumerate(([], [8] * 500)):
        s.add(sequence(order, DOCUMENT + more))
        finish(s, memory)
    s.add(made := sequence(2, DOCUMENT + [8] * count + [2] * 300))
    step(s, memory)
    taken = 1000 + count
    assert made.num_cached == taken
    assert (made.num_shared, len(made.shared)) == ((taken, 2) if is_shared else (0, 0))
    finish(s, memory)


def test_a_document_that_only_begins_with_what_is_read_gives_way() -> None:
    """Its own part was counted as free, but not given up, and admission failed."""
    s = Scheduler(MemoryPool(15_000), num_layers=LAYERS, max_running=8, cache_units=15_000)
    memory = FakeMemory(15_000)
    for order, more in enumerate(([], [8] * 1000)):
        s.add(sequence(order, DOCUMENT + more))
        finish(s, memory)
    s.add(reader := sequence(2, DOCUMENT + [1] * 10))
    s.add(made := sequence(3, [9] * 1300))
    s.schedule(256, is_decode_due=True)
    s.check_integrity()
    assert [share.count for share in reader.shared] == [1000]
    assert (made.state, s.cache.used) == (State.FILTERING, 0)


def test_a_request_gets_memory_that_documents_share() -> None:
    """Their common beginning has two owners, and seemed to be somebody's who does not give way."""
    s = Scheduler(MemoryPool(12_000), num_layers=LAYERS, max_running=8, cache_units=12_000)
    memory = FakeMemory(12_000)
    for order in (1, 2):
        s.add(sequence(order, DOCUMENT[:600] + [order] * 600))
        finish(s, memory)
    assert [len(document.shares) for document in s.cache.documents] == [1, 2]
    s.add(made := sequence(3, [9] * 2300))
    finish(s, memory)
    assert len(made.generated) == 4


def test_what_only_a_running_pass_would_keep_is_not_evicted_in_vain() -> None:
    """Nothing became free, and the next question read the document anew."""
    s = Scheduler(MemoryPool(17_000), num_layers=LAYERS, max_running=8, cache_units=17_000)
    memory = FakeMemory(17_000)
    for order, (tenant, ids) in enumerate(((b"b", [8] * 400), (b"a", DOCUMENT))):
        s.add(sequence(order, ids, tenant=tenant))
        finish(s, memory)
    s.add(sequence(2, DOCUMENT + [1] * 10, tenant=b"a"))  # reads what the other one is
    s.add(made := sequence(3, [9] * 2300, tenant=b"c"))
    s.schedule(256, is_decode_due=True)
    assert made.state is State.FILTERING
    assert [document.key.tenant for document in s.cache.documents] == [b"a"]


def test_a_question_gives_up_its_document_where_it_could_not_run_beside_it() -> None:
    """It needs more for its answer than is left beside the document that it begins with."""
    s = Scheduler(MemoryPool(9_000), num_layers=LAYERS, max_running=8, cache_units=9_000)
    memory = FakeMemory(9_000)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.add(made := sequence(1, DOCUMENT + [1] * 10, max_tokens=500))
    finish(s, memory)
    assert (len(made.generated), made.num_cached) == (500, 0)


def test_what_is_in_many_places_is_copied_into_one() -> None:
    """A pass attends to each place on its own, and conversations of many turns would get slow."""
    s, memory = cached(capacity=200_000)
    turns, copies = list(DOCUMENT), 0
    for order in range(12):
        turns += [order] * 300
        s.add(sequence(order, turns))
        copies += sum(len(plan.copies) for plan in finish(s, memory))
    assert s.cache.counts.hits == 11
    assert copies == 1
    assert len(s.cache.documents[-1].shares) <= MOST_SHARES + 1
    assert s.cache.used == 5 * len(turns)


def test_documents_are_not_evicted_in_vain() -> None:
    """The cache was emptied to keep one more document, though that could never have been enough."""
    s = Scheduler(MemoryPool(12_000), num_layers=LAYERS, max_running=8, cache_units=12_000)
    memory = FakeMemory(12_000)
    s.add(sequence(0, [1] * 300))
    finish(s, memory)
    assert s.cache.used == 1500
    big = sequence(1, [2] * 2000)
    plan = big.plan.having(budget=Budget(low=1, high=200, limit=200))
    big.request = replace(big.request, plan=plan)
    s.add(big)
    finish(s, memory)
    assert s.cache.used == 1500


def test_a_selection_needs_no_memory_for_an_answer() -> None:
    """Documents gave way to it, and where there was none, what had been read was not kept."""
    s = Scheduler(MemoryPool(5000), num_layers=LAYERS, max_running=8, cache_units=5000)
    made = sequence(0, DOCUMENT)
    selection = LiveSequence(replace(made.request, selects_only=True), made.order)
    s.add(selection)
    is_over = False
    while not is_over:
        plan = s.schedule(256, is_decode_due=True)
        assert plan.chunk is not None
        is_over = plan.chunk.is_last
        kept = {0: kept_of(selection, range(16))} if is_over else {}
        s.commit(plan, StepOutput(kept=kept, finished=frozenset(kept)))
        s.check_integrity()
    assert s.is_idle
    assert s.pool.used == s.cache.used == 5000


def test_the_document_that_was_used_longest_ago_gives_way() -> None:
    s, memory = cached(capacity=40_000)  # room for three
    for order, token in enumerate((1, 2, 3, 1, 4)):
        s.add(sequence(order, [token] * 1200))
        finish(s, memory)
    kept = [int(document.tokens[0]) for document in s.cache._documents]
    assert sorted(kept) == [1, 3, 4]


def test_common_beginnings_of_any_length() -> None:
    rng = Random(3)
    for _ in range(300):
        length, other = rng.randrange(3000), rng.randrange(3000)
        part = rng.randrange(3000)
        one, two = [5] * length, [5] * min(part, other) + [6] * max(0, other - part)
        assert num_common(as_tokens(one), as_tokens(two)) == min(length, other, part)


def test_a_document_that_was_found_and_evicted_is_not_found_again() -> None:
    """What a waiting prompt has found is remembered; its memory may be somebody else's by now."""
    s, memory = cached()
    for order in (7, 8):
        s.add(sequence(order, [order] * 1000))
        finish(s, memory)
    waiting = sequence(9, [7] * 1000 + [1] * 10)
    assert find_cached(s.cache, waiting)[1] == 1000
    s.cache.make_room(s.pool.free + 1)
    assert s.cache.used > 0
    assert find_cached(s.cache, waiting) == (None, 0)


def test_a_burst_does_not_empty_the_cache() -> None:
    """Requests that could only wait for their turn drove out all documents.

    Every question then read its document anew, and a server at 80% of its capacity stayed
    overloaded for good after one burst.
    """
    pool = MemoryPool(100_000)
    s = Scheduler(pool, num_layers=LAYERS, max_running=64, cache_units=50_000)
    memory = FakeMemory(100_000)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    evicted = s.cache.counts.evictions
    for order in range(1, 60):
        s.add(sequence(order, [order + 100] * 2000))
    step(s, memory)
    assert len(s.running) >= MOST_READING
    assert s.waiting
    assert s.pool.free >= s.cache.unused
    assert s.cache.counts.evictions == evicted
    question = sequence(60, DOCUMENT + [8] * 10)
    assert find_cached(s.cache, question)[1] >= len(DOCUMENT) - 1


def test_documents_give_way_if_little_is_being_read() -> None:
    s, memory = cached(10_000)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.add(sequence(1, [1] * (s.pool.free // 5 + 100)))
    step(s, memory)
    assert s.running
    assert s.cache.counts.evictions == 1


def test_documents_give_way_for_another_key_however_much_one_reads() -> None:
    """One that read eight documents at a time kept another one's questions waiting for seconds."""
    pool = MemoryPool(100_000)
    s = Scheduler(pool, num_layers=LAYERS, max_running=64, cache_units=90_000)
    memory, order = FakeMemory(100_000), 0
    while pool.free > 30_000:
        s.add(of(ALICE, sequence(order, [order] * 1000)))
        finish(s, memory)
        order += 1
    shared = Portion(1, None)
    for order in range(100, 100 + MOST_READING):
        s.add(of(ALICE, sequence(order, [order] * 1000)))
    s.schedule(256, is_decode_due=False, portion=shared)
    assert len(s.running) == MOST_READING
    evicted = s.cache.counts.evictions
    for tenant, waits in ((ALICE, True), (BOB, False)):
        late = of(tenant, sequence(len(s.sequences) + 200, [50] * 2500))
        assert late.reserved_units(KVLayout(growing=LAYERS)) > pool.free
        s.add(late)
        s.schedule(256, is_decode_due=False, portion=shared)
        assert (late.state is State.WAITING) == waits
        assert (s.cache.counts.evictions == evicted) == waits


def test_few_prompts_hold_memory_while_they_wait_for_their_turn() -> None:
    """A burst's prompts took all free memory, so the cache held a sixth of what it may.

    Much shorter ones do not wait for them, nor do those that come before them.
    """
    s = Scheduler(MemoryPool(60_000), num_layers=LAYERS, max_running=64, cache_units=50_000)
    alike = [sequence(order, [order] * 1000) for order in range(MOST_READING + 1)]
    for each in alike:
        s.add(each)
    s.schedule(256, is_decode_due=False)
    assert [each.state is State.WAITING for each in alike] == [False] * MOST_READING + [True]
    short, longer, urgent = (sequence(20 + i, [i] * n) for i, n in enumerate((300, 3000, 1000)))
    for each in (short, longer, with_priority(urgent, -1)):
        s.add(each)
    s.schedule(256, is_decode_due=False)
    assert [*s.waiting] == [alike[MOST_READING], longer]


def test_a_question_about_a_cached_document_does_not_wait_for_long_prompts() -> None:
    s = Scheduler(MemoryPool(60_000), num_layers=LAYERS, max_running=64, cache_units=50_000)
    memory = FakeMemory(60_000)
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    for order in range(1, 1 + MOST_READING):
        s.add(sequence(order, [order] * 1000))
    s.schedule(256, is_decode_due=False)
    cached_one, new = sequence(10, DOCUMENT + [1] * 10), sequence(11, [8] * 1010)
    s.add(new)
    s.add(cached_one)
    s.schedule(256, is_decode_due=False)
    assert [*s.waiting] == [new]


def test_those_overtaken_often_begin_one_at_a_time_and_hold_nobody_up() -> None:
    """After a burst all long prompts had been overtaken so often that short ones waited for them.

    So nobody's document was read while it was cached, and the backlog stayed.
    """
    s = Scheduler(MemoryPool(80_000), num_layers=LAYERS, max_running=64, cache_units=70_000)
    memory = FakeMemory(80_000)
    for order in range(MOST_READING):
        s.add(sequence(order, [order] * 1000))
    s.schedule(256, is_decode_due=False)
    overtaken = [sequence(10 + i, [10 + i] * 1500) for i in range(3)]
    for each in overtaken:
        each.times_passed = MAX_TIMES_PASSED
        s.add(each)
    s.add(short := sequence(20, [20] * 200))
    s.schedule(256, is_decode_due=False)
    assert [*s.waiting] == overtaken[1:]
    assert short.state is State.FILTERING
    s.finish(overtaken[0])
    s.schedule(256, is_decode_due=False)
    assert [*s.waiting] == overtaken[2:]
    finish(s, memory)
    assert not s.sequences


def test_what_a_request_can_have_is_what_giving_up_all_others_would_free() -> None:
    """It is not counted anew for each waiting request and the document that it spares."""
    s, memory = cached(60_000)
    rng = Random(5)
    for order in range(60):
        begin = [rng.randrange(4)] * rng.randrange(256, 900)
        made = sequence(order, begin + [order + 10] * rng.randrange(300))
        s.add(LiveSequence(replace(made.request, pin=rng.random() < 0.2), order))
        for _ in range(rng.randrange(6)):
            step(s, memory)
        documents = list(s.cache.documents)
        spared = rng.sample(documents, min(len(documents), rng.randrange(3)))
        for size in (100, s.pool.capacity):
            gives_way = size > s.pool.capacity - s.cache.pinned
            kept = [*spared, *(d for d in documents if d.is_pinned and not gives_way)]
            freed = sum(span.size for span in s.cache._held.without(kept))
            assert s.cache.available(size, spared) == s.pool.free + freed
    assert s.cache.pinned
