"""Decides which waiting requests begin in a step. No torch.

Whatever fits is admitted, in fair order (`fair_shares`). Later requests may overtake a large one,
but the first that was overtaken often and lacks memory has it as soon as all that runs now has
ended: what is admitted from then on must fit beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gemserve.engine.cache.document_cache import CachedDocument, DocumentCache
from gemserve.engine.memory import MemoryPool, Span
from gemserve.engine.reuse.lookup import (
    MAX_TIMES_PASSED,
    Answering,
    CacheSource,
    answering_of,
    awaits_leader,
)
from gemserve.engine.reuse.segments import awaits_segments, num_cached_tokens
from gemserve.engine.scheduling.fair_shares import SlotShares
from gemserve.engine.scheduling.request_memory import RequestMemory, spans_of
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.kv_layout import KVLayout

# Once so many prompts are being read, no other one takes memory that the document cache has or may
# fill: they are read one at a time, so it would only wait there. Else a burst of requests empties
# the cache, every question reads its document anew, and the server stays overloaded long after the
# burst. One that is much shorter than all of them does not wait for memory.
MOST_READING = 4
# Of those that must go on waiting, so many of the first and as many of the others, in turn, are
# looked at in one step, since each is compared with all that are being read. One that has just come
# is looked at in any case.
MOST_LOOKED_AT = 4

# tells the scheduler that a sequence begins, in which span and with what it takes over
Begin = Callable[[LiveSequence, Span, CacheSource | None], None]


@dataclass(slots=True)
class _Round:
    """What one step's admission goes by.

    `reading`: the prompts that are being read, and the tokens left of each. `num_tenants`: of
    those that wait or read. `copied`: documents that this step copies. `room`: units beside one
    that lacks memory; None: there is no such one.
    """

    slots: SlotShares
    answering: Answering
    reading: list[tuple[LiveSequence, int]]
    num_tenants: int
    copied: list[CachedDocument]
    room: int | None = None


class Admission:
    """Admits waiting requests. It reads the scheduler's queues and never changes them itself."""

    def __init__(
        self,
        pool: MemoryPool,
        cache: DocumentCache,
        memory: RequestMemory,
        *,
        layout: KVLayout,
        max_running: int,
        begin: Begin,
    ) -> None:
        self._pool, self._cache, self._memory = pool, cache, memory
        self._layout, self._max_running, self._begin = layout, max_running, begin
        self.awaits_compaction = False  # one waits until open passes are no longer in its way
        self._num_admitted = 0
        self._refused_at: object = None  # what it went by when it last admitted nobody
        self._next = 0  # the number of the one with which a step goes on behind the first ones

    def admit(
        self,
        waiting: Sequence[LiveSequence],
        running: Sequence[LiveSequence],
        taken: list[tuple[LiveSequence, CacheSource]],
        *,
        is_shared: bool,
    ) -> None:
        """Begin whatever fits.

        A step copies one document at most, so that nobody's next token waits for several. `taken`:
        what will be copied, to which this adds. `is_shared`: there are several tenants, so that
        none may hold all of the memory.
        """
        self.awaits_compaction = False
        if not waiting or len(running) >= self._max_running:
            return
        seen = self._seen(waiting, running, is_shared)
        if not taken and seen == self._refused_at:
            return
        now = self._new_round(waiting, running, taken, is_shared)
        looks = _Looks(self._next, has_copied=bool(taken))
        order = now.slots.order(waiting)
        for place, sequence in looks.through(order, now.slots):
            source, size = self._memory.needed(sequence, now.answering, now.copied)
            if not self._may_begin(sequence, source, size, running, now):
                looks.num_refused += 1
                continue
            is_copied = source is not None and not source.is_shared
            if is_copied and taken:
                looks.go_on_with(sequence)
                break
            span = self._memory.allocate(sequence, size, source, now.copied, running)
            if span is None:
                self.awaits_compaction = True
                looks.go_on_with(sequence)  # its place is made for it in the next steps
                break
            for earlier in order[:place]:
                earlier.times_passed += earlier.state is State.WAITING
                earlier.times_passed_led += earlier.awaits_leader
            self._num_admitted += 1
            sequence.admission, sequence.blocks_since = self._num_admitted, None
            self._begin(sequence, span, source)
            now.room = None if now.room is None else now.room - size
            now.slots.take(sequence, size)
            now.reading += [(sequence, sequence.left_to_read)] if takes_turns(sequence) else []
            if source is not None and is_copied:
                taken.append((sequence, source))
                now.copied += [] if source.document is None else [source.document]
        self._next = looks.next
        self._refused_at = seen if looks.has_seen_all else None

    def is_led(self, sequence: LiveSequence, running: Iterable[LiveSequence]) -> bool:
        """Is another's pass under way that will leave what this one needs?"""
        if awaits_leader(self._cache, sequence, running, self._layout):
            return True
        return awaits_segments(self._cache, sequence, running)

    def _new_round(
        self,
        waiting: Sequence[LiveSequence],
        running: Sequence[LiveSequence],
        taken: list[tuple[LiveSequence, CacheSource]],
        is_shared: bool,
    ) -> _Round:
        capacity = self._pool.capacity if is_shared else None
        reading = [(s, s.left_to_read) for s in running if takes_turns(s)]
        tenants = {s.request.tenant for s in waiting} | {s.request.tenant for s, _ in reading}
        return _Round(
            slots=SlotShares(running, self._max_running, capacity),
            answering=answering_of(running),
            reading=reading,
            num_tenants=len(tenants),
            copied=[source.document for _, source in taken if source.document is not None],
        )

    def _seen(
        self,
        waiting: Sequence[LiveSequence],
        running: Sequence[LiveSequence],
        is_shared: bool,
    ) -> object:
        """What decides who is admitted, but the progress of passes.

        As long as it stays, whoever was not admitted is not looked at again: where many wait, that
        would take longer than the steps.
        """
        states = tuple((s.order, s.state, takes_turns(s)) for s in running)
        numbers = tuple(s.order for s in waiting)
        return is_shared, self._pool.num_changes, self._cache.num_changes, states, numbers

    def _may_begin(
        self,
        sequence: LiveSequence,
        source: CacheSource | None,
        size: int,
        running: Sequence[LiveSequence],
        now: _Round,
    ) -> bool:
        """May this one, which needs `size` units, begin in this step?

        One that was overtaken often may have more than its tenant's part of the memory, and begins
        though enough are being read, one of a tenant at a time each.
        """
        is_overtaken = sequence.times_passed >= MAX_TIMES_PASSED
        tenant = sequence.request.tenant
        sequence.is_beyond_part = not now.slots.may_have(sequence, size)
        if sequence.is_beyond_part and (not is_overtaken or _has_more(tenant, running)):
            return False
        has_memory = size <= self._memory.available(size, source, now.copied)
        has_memory = has_memory and (now.room is None or size <= now.room)
        is_in_turn = self._is_in_turn(sequence, source, size, now)
        others_beside = any(s.is_beside for s, _ in now.reading if s.request.tenant == tenant)
        sequence.is_beside = not is_in_turn and is_overtaken and not others_beside
        is_fitting = has_memory and (is_in_turn or sequence.is_beside)
        sequence.awaits_leader = is_fitting and self.is_led(sequence, running)
        if is_fitting:
            return not sequence.awaits_leader
        if now.room is None and is_overtaken:
            now.room = self._room_beside(sequence, size, running, has_memory=has_memory)
        return False

    def _is_in_turn(
        self, sequence: LiveSequence, source: CacheSource | None, size: int, now: _Round
    ) -> bool:
        """May this one take `size` units beside the prompts that are being read?

        It may if these are few, if it is much shorter, or if it leaves the document cache what that
        may hold. A tenant has its part of the few, at least one, and is compared with itself. What
        comes later by its own priorities does not count.
        """
        if size + self._cache.unused <= self._pool.free:
            return True
        tenant, priority = sequence.request.tenant, sequence.request.priority
        own, num_others = list[int](), 0
        for other, left in now.reading:
            if other.request.tenant != tenant:
                num_others += 1
            elif other.request.priority <= priority:
                own.append(left)
        num_before = len(own) + num_others
        if num_before < MOST_READING or len(own) * now.num_tenants < MOST_READING:
            return True
        least, taken_over = min(own), 0 if source is None else source.count
        if sequence.segment_pass is not None and 2 * sequence.read_after_filter < least:
            taken_over = num_cached_tokens(self._cache, sequence)
        return 2 * (sequence.left_to_read - taken_over) < least

    def _room_beside(
        self,
        sequence: LiveSequence,
        size: int,
        running: Sequence[LiveSequence],
        *,
        has_memory: bool,
    ) -> int | None:
        """Units that may be admitted without `sequence`, which needs `size`, waiting for them.

        None: it has never lacked memory.
        """
        if sequence.blocks_since is None:
            if has_memory:
                return None
            sequence.blocks_since = self._num_admitted
        since = sequence.blocks_since
        stays = [span for s in running if s.admission > since for span in spans_of(s)]
        stays += self._cache.staying(size)
        return self._pool.capacity - size - sum({id(span): span.size for span in stays}.values())


class _Looks:
    """Which of those that wait one step looks at: all, or some, if many must go on waiting.

    `next`: the number of the one with which the next step goes on behind the first ones; 0: from
    the beginning.
    """

    def __init__(self, start: int, *, has_copied: bool) -> None:
        self._start = start
        self.next = self.num_refused = 0
        self.has_seen_all = not has_copied  # else some may have been refused for the copy alone

    def through(
        self, order: Sequence[LiveSequence], slots: SlotShares
    ) -> Iterator[tuple[int, LiveSequence]]:
        """Each one that may have a slot, with its place in `order`."""
        start = next((place for place, s in enumerate(order) if s.order == self._start), 0)
        for place, sequence in enumerate(order):
            if (self.next and sequence.was_looked_at) or not slots.may_take(sequence):
                continue
            is_left_out = sequence.was_looked_at and self.num_refused >= MOST_LOOKED_AT
            if is_left_out and place < start:
                self.has_seen_all = False
            elif is_left_out and self.num_refused >= 2 * MOST_LOOKED_AT:
                self.go_on_with(sequence)
            else:
                sequence.was_looked_at = True
                yield place, sequence

    def go_on_with(self, sequence: LiveSequence) -> None:
        """Note that this step looks no further than here."""
        self.next, self.has_seen_all = sequence.order, False


def _has_more(tenant: bytes, running: Iterable[LiveSequence]) -> bool:
    """Does a sequence of this tenant run that has more than its tenant's part of the memory?"""
    return any(s.is_beyond_part and s.request.tenant == tenant for s in running)


def takes_turns(sequence: LiveSequence) -> bool:
    """Is its prompt being read, unless it waits for what the disk or another engine has of it?"""
    is_reading = sequence.state in (State.FILTERING, State.PREFILLING)
    return is_reading and not sequence.is_loading and not sequence.is_awaiting
