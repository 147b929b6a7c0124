"""The document cache: what is shared or copied is always what a pass would write.

No torch: a list of numbers stands for the memory. A pass writes a fingerprint of everything that a
token's keys depend on into the token's first unit and its last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.cache.common_tokens import as_tokens, num_common
from gemserve.engine.cache.document_cache import FEWEST_TOKENS
from gemserve.engine.memory import Change, KVPlace, MemoryPool, Repack, Stretch, Wipe
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Kept, StepOutput, StepPlan
from gemserve.kv_layout import KVLayout
from tests.unit.test_scheduler import kept_of

LAYERS = 8
ALL_GROW = KVLayout(growing=LAYERS)


class FakeAdapter:
    num_positions = 0

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version


def sequence(
    order: int,
    ids: list[int],
    *,
    layer: int = 2,
    tenant: bytes = b"",
    adapter: FakeAdapter | None = None,
    question: int = 8,
    limit: int | None = None,
    max_tokens: int = 4,
    is_whole: bool = False,
) -> LiveSequence:
    """`is_whole`: it is read whole, and `layer`, `question` and `limit` count for nothing."""
    kept = len(ids) if is_whole else min(16, len(ids))
    return LiveSequence(
        request=Request(
            request_id=str(order),
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=max_tokens),
            filter=FilterParams(method="sieve", keep=16),
            tenant=tenant,
            adapter=adapter,
            plan=FilterPlan(
                reason="disabled" if is_whole else None,
                num_kept=kept,
                budget=Budget(low=1, high=kept, limit=limit or kept),
                layer=None if is_whole else layer,
                rows=() if is_whole else tuple(range(len(ids) - question, len(ids))),
            ),
        ),
        order=order,
    )


def fingerprints(s: LiveSequence) -> list[int]:
    adapter = s.request.adapter
    version = None if adapter is None else (adapter.name, adapter.version)
    value = hash((s.request.tenant, version, None if s.is_whole else s.filter_layer))
    return [value := hash((value, token)) for token in s.request.prompt_ids]


class FakeMemory:
    def __init__(self, size: int, layout: KVLayout = ALL_GROW) -> None:
        self.units, self.layout = [0] * size, layout
        self._fingerprints: dict[tuple[int, bool], list[int]] = {}

    def apply(self, moves: Iterable[Change]) -> None:
        units = self.units
        for move in moves:
            if isinstance(move, Wipe):
                units[move.start : move.start + move.size] = [0] * move.size
            elif isinstance(move, Repack):
                for row in range(move.num_rows):
                    source, target = (move.start + row * size for size in (move.old, move.new))
                    units[target : target + move.new] = units[source : source + move.new]
                source, target = (move.start + move.num_rows * n for n in (move.old, move.new))
                units[target : target + move.tail] = units[source : source + move.tail]
            else:
                part = units[move.source : move.source + move.size]
                units[move.target : move.target + move.size] = part

    def move_and_copy(self, plan: StepPlan) -> None:
        units = self.units
        self.apply(plan.moves)
        for copy in plan.copies:
            for row in range(copy.token_units):
                taken = [units[at] for part in copy.source for at in _tokens(part, row)]
                start = copy.target.start + row * copy.target.capacity
                units[start : start + len(taken)] = taken
            for of, into in copy.windows:
                for row in range(copy.window_units):
                    for at, to in zip(_tokens(of, row), _tokens(into, row), strict=True):
                        units[to] = units[at]

    def read(self, s: LiveSequence, start: int, count: int) -> None:
        """A pass over some tokens: what it finds of those before must be right."""
        expected = self._fingerprints.get((s.order, s.is_whole)) or fingerprints(s)
        self._fingerprints[s.order, s.is_whole] = expected
        place, growing = s.place, 2 * self.layout.growing - 1
        if place.room is not None:
            self._read_windows(place, expected, start, start + count)
        for row in (0, growing if s.is_whole else 2 * (s.filter_layer or 0)):
            own = Stretch(place.start, place.capacity, place.capacity)
            at = [unit for part in (*place.shared, own) for unit in _tokens(part, row)]
            found = [self.units[unit] for unit in at[:start]]
            assert found == expected[:start], "not this prompt's"
            assert start >= s.num_shared, "shared tokens are not read again"
            for unit, value in zip(at[start : start + count], expected[start:], strict=False):
                self.units[unit] = value

    def _read_windows(
        self, place: KVPlace, expected: list[int], start: int, stop: int, *, sees: bool = True
    ) -> None:
        """The same in layers with a sliding window, which move on and save ranges."""
        room, windowed = place.room, self.layout.windowed
        assert room is not None
        assert room.window == self.layout.window
        saved = place.start + 2 * self.layout.growing * place.capacity
        recent = saved + 2 * windowed * room.num_saved
        before, first = room.first(start), room.first(stop)
        for row in (0, 2 * windowed - 1):
            at = recent + row * room.recent
            found = {t: self.units[at + t - before] for t in range(before, start)}
            for t in range(max(0, start - room.window), start):
                assert found[t] == expected[t] or not sees, "not this prompt's window"
            found |= {t: expected[t] for t in range(start, stop)}
            for t in range(first, stop):
                self.units[at + t - first] = found[t]
            for some in () if room.has_all else room.saved:
                at = saved + row * room.num_saved + some.at - some.first
                for t in range(max(start, some.first), min(stop, some.stop)):
                    self.units[at + t] = expected[t]

    def write_answer(self, s: LiveSequence) -> None:
        """A decode step of a prompt that was read whole."""
        slot = s.next_slot
        if s.place.room is not None:
            self._read_windows(s.place, [-2] * (slot + 1), slot, slot + 1, sees=False)
        for row in (0, 2 * self.layout.growing - 1):
            self.units[s.memory.start + row * s.capacity + slot] = -2

    def overwrite(self, s: LiveSequence) -> None:
        """Generation uses all memory that the sequence has left."""
        span = s.memory
        self.units[span.start : span.start + span.size] = [-1] * span.size


def _tokens(stretch: Stretch, row: int) -> range:
    """Where a stretch's tokens have their unit of that row."""
    start = stretch.start + row * stretch.capacity + stretch.first
    return range(start, start + stretch.count)


def perform(by: Scheduler, plan: StepPlan, memory: FakeMemory, rng: Random) -> StepOutput:
    memory.move_and_copy(plan)
    kept: dict[int, Kept] = {}
    tokens = {row.sequence: [1] for row in plan.decodes}
    chunk = plan.chunk
    for row in plan.decodes:
        if (decoding := by.sequences[row.sequence]).is_whole:
            memory.write_answer(decoding)
    if chunk is not None:
        s, number = by.sequences[chunk.sequence], chunk.sequence
        if chunk.is_filter:
            memory.read(s, chunk.start, chunk.count)
            if rng.random() < 0.03:
                some = kept_of(s, range(min(s.num_prompt, s.plan.budget.limit)))
                kept[number] = replace(some, has_failed=True)
            elif chunk.is_last:
                count = rng.choice((s.plan.budget.high, s.plan.budget.limit))
                kept[number] = kept_of(s, range(min(count, s.num_prompt)))
        else:
            if s.is_whole:
                memory.read(s, chunk.start, chunk.count)
            else:
                memory.overwrite(s)
            if chunk.is_last:
                tokens[number] = [1]
    finished = frozenset(
        number
        for number in tokens
        if len((s := by.sequences[number]).generated) + 1 == s.request.sampling.max_tokens
    )
    return StepOutput(tokens=tokens, kept=kept, finished=finished)


def finish(s: Scheduler, memory: FakeMemory) -> list[StepPlan]:
    plans = []
    rng = Random(0)
    rng.random = lambda: 0.9  # type: ignore[method-assign]  # nothing fails
    for _ in range(1000):
        plan = s.schedule(256, is_decode_due=True)
        plans.append(plan)
        s.commit(plan, perform(s, plan, memory, rng))
        if s.is_idle:
            return plans
    raise AssertionError("it did not end")


def cached(capacity: int = 100_000) -> tuple[Scheduler, FakeMemory]:
    pool = MemoryPool(capacity)
    s = Scheduler(pool, num_layers=LAYERS, max_running=8, cache_units=capacity // 2)
    return s, FakeMemory(capacity)


def test_a_second_question_reads_only_itself() -> None:
    s, memory = cached()
    document = [7] * 1000
    for order, question in enumerate(([1] * 10, [2] * 10)):
        s.add(sequence(order, document + question))
        plans = finish(s, memory)
    read = [p.chunk.count for p in plans if p.chunk is not None and p.chunk.is_filter]
    assert read == [10]


def test_ten_questions_at_once_read_the_document_once() -> None:
    s, memory = cached()
    for order in range(10):
        s.add(sequence(order, [7] * 1000 + [order] * 10))
    plans = finish(s, memory)
    read = sum(p.chunk.count for p in plans if p.chunk is not None and p.chunk.is_filter)
    assert read == 1010 + 9 * 10


def test_one_document_is_kept_once_whatever_is_asked_of_it() -> None:
    s, memory = cached()
    for order in range(5):
        s.add(sequence(order, [7] * 1000 + [order] * 10))
        finish(s, memory)
    assert s.cache.used == 1010 * 5  # layers 0 and 1 with values, and layer 2's keys


def test_a_document_keeps_no_memory_that_was_meant_for_the_answer() -> None:
    """A long answer reserves more than reading does; the cache must not hold the rest of it."""
    s, memory = cached()
    s.add(sequence(0, [7] * 300, max_tokens=200))
    finish(s, memory)
    assert s.cache.used == 300 * 5


def test_a_longer_conversation_takes_the_place_of_its_beginning() -> None:
    s, memory = cached()
    s.add(sequence(0, [7] * 1000))
    finish(s, memory)
    s.add(sequence(1, [7] * 1000 + [8] * 500))
    finish(s, memory)
    assert s.cache.used == 1500 * 5


@pytest.mark.parametrize("other", ["tenant", "adapter", "version", "layer"])
def test_nothing_is_shared_across(other: str) -> None:
    s, memory = cached()
    ids = [7] * 1000
    s.add(sequence(0, ids, tenant=b"a", adapter=FakeAdapter("x", "1")))
    finish(s, memory)
    s.add(
        sequence(
            1,
            ids,
            tenant=b"b" if other == "tenant" else b"a",
            adapter=FakeAdapter("y" if other == "adapter" else "x", "12"[other == "version"]),
            layer=3 if other == "layer" else 2,
        )
    )
    finish(s, memory)
    assert s.cache.counts.hits == 0


def test_a_cancelled_leader_does_not_hold_up_the_others() -> None:
    s, memory = cached()
    first, second = (sequence(order, [7] * 1000 + [order] * 10) for order in range(2))
    s.add(first)
    s.add(second)
    s.commit(plan := s.schedule(256, is_decode_due=True), perform(s, plan, memory, Random(1)))
    assert second.state is State.WAITING
    s.finish(first)
    finish(s, memory)
    assert len(second.generated) == 4


def test_requests_get_the_memory_that_documents_hold() -> None:
    s, memory = cached(capacity=12_000)
    for order in range(4):
        s.add(sequence(order, [order] * 1000))
        finish(s, memory)
        s.check_integrity()
    s.add(sequence(9, [9] * 2300))
    finish(s, memory)
    assert s.cache.counts.evictions > 0


def test_short_beginnings_are_not_worth_it() -> None:
    s, memory = cached()
    for order in range(2):
        s.add(sequence(order, [7] * (FEWEST_TOKENS - 1) + [order] * 300))
        finish(s, memory)
    assert s.cache.counts.hits == 0


def test_common_beginnings() -> None:
    assert num_common(as_tokens([1, 2, 3]), as_tokens([1, 2, 4, 5])) == 2
    assert num_common(as_tokens([1, 2]), as_tokens([1, 2, 4])) == 2
    assert num_common(as_tokens([]), as_tokens([1])) == 0
