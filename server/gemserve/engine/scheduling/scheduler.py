"""Decides what runs next: a decode step when one is due, else a slice of a prompt's pass.

A step is one token of every decoding sequence, or a slice of one prompt's pass. A pass goes over a
chunk of tokens, which may take several steps to get through its layers.

Admission reserves a request's peak memory. So no running request lacks memory, and no two requests
wait for each other. A request that turns out to need more gives back its memory and is admitted
again.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator

from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import CachedDocument, DocumentCache
from gemserve.engine.memory import KVPlace, MemoryPool, Span
from gemserve.engine.reuse.cheapest_way import is_cheaper_whole
from gemserve.engine.reuse.lookup import (
    MAX_TIMES_PASSED,
    Answering,
    CacheSource,
    answering_of,
    awaits_leader,
    find_source,
    leave_filter_pass,
    leave_unfinished_pass,
    leave_whole_prompt,
    note_held,
)
from gemserve.engine.reuse.segments import (
    awaits_segments,
    end_arrived,
    find_segments,
    found_segments,
    leave_segments,
    num_cached_tokens,
    release_segments,
)
from gemserve.engine.scheduling.fair_shares import ReadingShares, SlotShares
from gemserve.engine.scheduling.prompt_lookup import PromptLookup
from gemserve.engine.scheduling.time_shares import Portion, TimeTurns
from gemserve.engine.sequence.segment_pass import SegmentPass
from gemserve.engine.sequence.sequence import LAST, LiveSequence, State
from gemserve.engine.sequence.step_plan import Chunk, DecodeRow, Kept, StepOutput, StepPlan
from gemserve.kv_layout import KVLayout

# Tokens of a chunk if all of its tokens are scored, because each needs a row of logits.
MAX_SCORED_TOKENS = 256
MAX_IDLE_TOKENS = 128  # of a chunk that is read in idle time: a request waits for its end

# Once so many prompts are being read, no other one takes memory that the document cache has or may
# fill: they are read one at a time, so it would only wait there. Else a burst of requests empties
# the cache, every question reads its document anew, and the server stays overloaded long after the
# burst. One that is much shorter than all of them does not wait for memory.
MOST_READING = 4
# Of those that must go on waiting, so many of the first and as many of the others, in turn, are
# looked at in one step, since each is compared with all that are being read. And so often they are
# asked whether another's pass reads for them, which only says that they are not late.
MOST_LOOKED_AT = 8
_LED_PERIOD_S = 0.25
# Of an open chunk's tokens, as many of documents may give way so that nobody waits for its end.
CHUNK_PART = 0.25


class Scheduler:
    """Owns the states of all sequences and the bookkeeping of the memory pool."""

    def __init__(
        self,
        pool: MemoryPool,
        *,
        num_layers: int,
        max_running: int,
        cache_units: int = 0,
        shape: ModelShape | None = None,
        layout: KVLayout | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        """`num_layers`: those with keys and values. `cache_units`: how much of the pool the
        document cache may hold. `layout`: how sequences have their keys and values; None: as those
        do that keep all tokens in all layers.

        `shape`: the model's, by which the costs of reading a prompt whole and of filtering it are
        compared; None: they are not. `lookup`: what proposes tokens for decode steps; None: nothing
        does.
        """
        self.pool = pool
        self.cache = DocumentCache(pool, cache_units)
        # looks for more of an admitted sequence on the disk: see `DiskCache.begin_load`
        self.begin_load: Callable[[LiveSequence, int], object] = lambda sequence, num_cached: None
        self._layout, self._shape = layout or KVLayout(growing=num_layers), shape
        self._max_running, self._lookup = max_running, lookup
        self._awaits_compaction = False
        self._num_admitted = 0
        self._refused_at: object = None  # what `_admit` went by when it last admitted nobody
        self._looked_at = 0  # where the next step goes on behind the first of those that wait
        self._asked_led_s = -math.inf
        self._turns = TimeTurns()
        self._reading = ReadingShares()
        self.waiting: list[LiveSequence] = []
        self.running: list[LiveSequence] = []
        self.sequences: dict[int, LiveSequence] = {}  # all that have not ended

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def fits_ever(self, sequence: LiveSequence) -> bool:
        """Could this sequence run if it were alone?"""
        return sequence.reserved_units(self._layout) <= self.pool.capacity

    def add(self, sequence: LiveSequence) -> None:
        assert sequence.state is State.WAITING
        assert self.fits_ever(sequence)
        assert sequence.order not in self.sequences, "two sequences have one number"
        self.sequences[sequence.order] = sequence
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def schedule(
        self, chunk_tokens: int, *, is_decode_due: bool, portion: Portion | None = None
    ) -> StepPlan:
        """Admit what fits, then plan one step.

        Decoding sequences advance if that is due or there is nothing to read: all of them, or, if
        several tenants share the engine, those whose turn it is (`time_shares.Turns`). Otherwise a
        chunk of at most `chunk_tokens` of an unfinished prompt advances.
        """
        assert chunk_tokens > 0
        self._reading.parts = {} if portion is None else portion.reading_of
        taken = self._take_over()
        self._admit(taken, is_shared=portion is not None)
        moves = self.pool.take_changes()
        # only now, because compaction for one moves what another takes over
        copies = [source.copy_to(sequence, self._layout) for sequence, source in taken]
        decoding = [s for s in self.running if s.state is State.DECODING]
        chunk = None if decoding and is_decode_due else self._next_chunk(chunk_tokens)
        if chunk is None and portion is not None:
            decoding = self._turns.choose(decoding, portion)
        rows = tuple(map(_decode_row, decoding)) if chunk is None else ()
        if rows and self._lookup is not None and portion is None:
            rows = self._lookup.propose(rows, decoding)
        return StepPlan(tuple(moves), tuple(copies), rows, chunk)

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        """Advance every sequence of the plan by what its step produced."""
        if plan.chunk is not None:
            self._reading.note(self.sequences[plan.chunk.sequence], output.taken_s)
        if plan.chunk is not None and plan.chunk.sequence not in output.failures:
            if output.is_chunk_done:
                self._advance(plan.chunk, output)
            else:
                self.sequences[plan.chunk.sequence].open_tokens = plan.chunk.count
        if plan.decodes and self._lookup is not None:
            self._lookup.learn(plan.decodes, output.tokens, self.sequences, output.taken_s)
        for row in plan.decodes:
            if row.sequence not in output.failures:
                self.sequences[row.sequence].generated += output.tokens[row.sequence]
        for number in output.finished:
            self.finish(self.sequences[number])
        for number in output.failures:
            self.finish(self.sequences[number], has_failed=True)

    def finish(self, sequence: LiveSequence, has_failed: bool = False) -> None:
        """End a sequence in any state and free its memory. Idempotent.

        The document cache may have what is read of its prompt: whoever asks again, after a client
        that did not wait for the end, goes on from there.
        """
        if sequence.state is State.FINISHED:
            return
        if not has_failed:
            self._leave(sequence)
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        del self.sequences[sequence.order]
        self._release(sequence)

    def forget_documents(self, ids: Collection[str]) -> None:
        """Drop what is cached of stored documents; passes that contain them store nothing."""
        self.cache.forget(ids)
        for sequence in self.waiting:
            sequence.forget_found()

    def check_integrity(self) -> None:
        """Check that states, queues and memory agree. Raises `AssertionError`."""
        self.pool.check_integrity()
        assert {*self.sequences.values()} == {*self.running, *self.waiting}
        owned = [span for document in self.cache.documents for span in document.spans]
        for sequence in self.running:
            assert sequence.state in (State.FILTERING, State.PREFILLING, State.DECODING)
            assert not sequence.shared or sequence.state is State.FILTERING
            owned += _spans_of(sequence)
            needed = sequence.kept_units(self._layout)
            if sequence.is_reading:
                needed = sequence.reserved_units(self._layout, sequence.num_shared)
            assert sequence.memory.size == needed, (sequence.memory, needed)
            assert 0 <= sequence.done <= sequence.pass_length
            assert len(sequence.generated) <= sequence.request.sampling.max_tokens
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.span is None
            assert not sequence.shared
        self.cache.check_integrity()
        self.pool.check_owners(owned)

    def _take_over(self) -> list[tuple[LiveSequence, CacheSource]]:
        """What the first sequence whose filter has just chosen takes over from others, if anything.

        The kept tokens may begin like those of an earlier choice. The others wait for their turn,
        so that a step copies one document at most.
        """
        for sequence in [s for s in self.running if s.awaits_source]:
            sequence.awaits_source = False
            source = find_source(self.cache, sequence, answering_of(self.running))
            self._begin_pass(sequence, source)
            if source is not None:
                return [(sequence, source)]
        return []

    def _admit(self, taken: list[tuple[LiveSequence, CacheSource]], *, is_shared: bool) -> None:
        """Admit whatever fits, in fair order. Later requests may overtake a large one.

        Documents in the cache give way. Scattered free units are made one by compaction. What
        passes that have begun hold views of stays in its place; if it is in the way, they are
        finished first. A step copies one document at most, so that nobody's next token waits for
        several. `taken`: what will be copied, to which this adds. `is_shared`: there are several
        tenants, so that none may hold all of the memory.

        The first that was overtaken often and lacks memory has it as soon as all that runs now has
        ended: what is admitted from then on must fit beside it.
        """
        # these must stay until this plan has been carried out
        copied = [source.document for _, source in taken if source.document is not None]
        self._awaits_compaction = False
        if not self.waiting or len(self.running) >= self._max_running:
            return
        seen = self._seen_by_admission(is_shared)
        if not taken and seen == self._refused_at:
            return
        self._refused_at = None
        capacity = self.pool.capacity if is_shared else None
        slots = SlotShares(self.running, self._max_running, capacity)
        answering = answering_of(self.running)
        reading = [(s, s.left_to_read) for s in self.running if _takes_turns(s)]
        tenants = {s.request.tenant for s in self.waiting}
        num_tenants = len(tenants | {s.request.tenant for s, _ in reading})
        room: int | None = None  # beside one that lacks memory
        order = slots.order(self.waiting)
        asks_led = time.monotonic() >= self._asked_led_s + _LED_PERIOD_S
        start = self._looked_at if self._looked_at < len(order) else 0
        self._looked_at, num_refused, is_all = 0, 0, not taken
        for place, sequence in enumerate(order):
            if not slots.may_take(sequence):
                continue
            if num_refused >= MOST_LOOKED_AT and place < start:
                is_all = False
                continue
            if num_refused >= 2 * MOST_LOOKED_AT:
                self._looked_at, is_all = place, False
                break
            source, size = self._fitting(sequence, answering, copied)
            is_overtaken = sequence.times_passed >= MAX_TIMES_PASSED
            if not is_overtaken and not slots.may_have(sequence, size):
                num_refused += 1
                continue
            has_memory = size <= self._available(size, source, copied)
            has_memory = has_memory and (room is None or size <= room)
            may_begin = self._may_begin(sequence, size, source, reading, num_tenants)
            # one that was overtaken often may as well, one of a tenant at a time
            is_beside = not may_begin and is_overtaken and _is_first_beside(sequence, reading)
            is_fitting = has_memory and (may_begin or is_beside)
            may_be_late = math.isfinite(sequence.request.begin_within_s)
            is_asked = may_be_late and (asks_led or sequence.awaits_leader is None)
            if is_fitting or is_asked:
                sequence.awaits_leader = self._awaits_leader(sequence)
            elif not may_be_late:
                sequence.awaits_leader = None
            if is_fitting and sequence.awaits_leader:
                num_refused += 1
                continue
            if is_fitting and taken and source is not None and not source.is_shared:
                is_all = False
                break
            if not is_fitting:
                num_refused += 1
                if room is None and is_overtaken and slots.may_have(sequence, size):
                    room = self._room_beside(sequence, size, has_memory=has_memory)
                continue
            span = self._make_room(sequence, size, _spared(source, copied))
            if span is None:
                if not self._compact(sequence, size, _spared(source, copied)):
                    self._awaits_compaction, is_all = True, False
                    break
                span = self.pool.allocate(size)
                assert span is not None
            for earlier in order[:place]:
                earlier.times_passed += earlier.state is State.WAITING
                earlier.times_passed_led += earlier.awaits_leader is True
            self._num_admitted += 1
            sequence.admission, sequence.blocks_since = self._num_admitted, None
            sequence.is_beside = is_beside
            room = None if room is None else room - size
            slots.take(sequence, size)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.span, sequence.found = span, None
            span.is_private = bool(sequence.request.documents)
            sequence.most_held = max(sequence.most_held, size)
            self._begin_pass(sequence, source)
            reading += [(sequence, sequence.left_to_read)] if _takes_turns(sequence) else []
            if source is not None and not source.is_shared:
                taken.append((sequence, source))
                copied += [] if source.document is None else [source.document]
        self._refused_at = seen if is_all else None
        if asks_led:
            self._asked_led_s = time.monotonic()

    def _seen_by_admission(self, is_shared: bool) -> object:
        """What decides who is admitted, but the progress of passes.

        As long as it stays, whoever was not admitted is not looked at again: where many wait, that
        would take longer than the steps.
        """
        running = tuple((s.order, s.state, _takes_turns(s)) for s in self.running)
        waiting = tuple(s.order for s in self.waiting)
        return is_shared, self.pool.num_changes, self.cache.num_changes, running, waiting

    def _room_beside(self, sequence: LiveSequence, size: int, *, has_memory: bool) -> int | None:
        """Units that may be admitted without `sequence`, which needs `size`, waiting for them.

        None: it has never lacked memory.
        """
        if sequence.blocks_since is None:
            if has_memory:
                return None
            sequence.blocks_since = self._num_admitted
        since = sequence.blocks_since
        later = (span for s in self.running if s.admission > since for span in _spans_of(s))
        return self.pool.capacity - size - sum({id(span): span.size for span in later}.values())

    def _compact(self, sequence: LiveSequence, size: int, spared: list[CachedDocument]) -> bool:
        """Make scattered free units one; False: passes that have begun are in the way.

        Documents give way where that helps, since a chunk of a long prompt can take a minute. They
        must be read again, so it must be little beside that chunk.
        """
        open_passes = [s for s in self.running if s.open_tokens]
        fixed = [span for open_pass in open_passes for span in _spans_of(open_pass)]
        if self.pool.compact(size, fixed):
            return True
        open_units = sum(s.open_tokens * s.memory.size // s.capacity for s in open_passes)
        most, tenant = int(CHUNK_PART * open_units), sequence.request.tenant
        if not self.cache.make_place(size, fixed, most, spared, tenant):
            return False
        return self.pool.compact(size, fixed)

    def _awaits_leader(self, sequence: LiveSequence) -> bool:
        """Is another's pass under way that will leave what this one needs?"""
        if awaits_leader(self.cache, sequence, self.running, self._layout):
            return True
        return awaits_segments(self.cache, sequence, self.running)

    def _may_begin(
        self,
        sequence: LiveSequence,
        size: int,
        source: CacheSource | None,
        reading: Iterable[tuple[LiveSequence, int]],
        num_tenants: int,
    ) -> bool:
        """May this one take `size` units beside the prompts that are being read?

        `reading`: these, and the tokens left of each.
        It may if these are few, if it is much shorter, or if it leaves the document cache what that
        may hold. A tenant has its part of the few, at least one, and is compared with itself. What
        comes later by its own priorities does not count.
        """
        if size + self.cache.unused <= self.pool.free:
            return True
        tenant, priority = sequence.request.tenant, sequence.request.priority
        own, num_others = list[int](), 0
        for other, left in reading:
            if other.request.tenant != tenant:
                num_others += 1
            elif other.request.priority <= priority:
                own.append(left)
        num_before = len(own) + num_others
        if num_before < MOST_READING or len(own) * num_tenants < MOST_READING:
            return True
        least, taken_over = min(own), 0 if source is None else source.count
        if sequence.segment_pass is not None and 2 * sequence.read_after_filter < least:
            taken_over = num_cached_tokens(self.cache, sequence)
        return 2 * (sequence.left_to_read - taken_over) < least

    def _fitting(
        self, sequence: LiveSequence, answering: Answering, copied: list[CachedDocument]
    ) -> tuple[CacheSource | None, int]:
        """What a waiting sequence takes over, and the memory that it needs then.

        It is read whole if it may be, if that is cheaper, and if there is memory for it.
        """
        sequence.read_filtered()
        shape, cache = self._shape, self.cache
        if shape is None or not sequence.may_read_whole:
            return self._fitting_as_is(sequence, answering, copied)
        if is_cheaper_whole(cache, sequence, answering, shape):
            sequence.read_whole()
            source, size = self._fitting_as_is(sequence, answering, copied)
            if source is not None and size <= self._available(size, source, copied):
                return source, size
            sequence.read_filtered()
        return self._fitting_as_is(sequence, answering, copied)

    def _fitting_as_is(
        self, sequence: LiveSequence, answering: Answering, copied: list[CachedDocument]
    ) -> tuple[CacheSource | None, int]:
        """The same for the way that the sequence is to be read.

        It takes over nothing if only the memory of that would let it run.
        """
        source = find_source(self.cache, sequence, answering)
        if source is not None:
            size = sequence.reserved_units(self._layout, source.num_shared)
            if source.document is None:
                return source, size
            if size <= self._available(size, source, copied):
                return source, size
        return None, sequence.reserved_units(self._layout)

    def _available(
        self, size: int, source: CacheSource | None, copied: list[CachedDocument]
    ) -> int:
        """Units that a sequence which needs `size` can have now."""
        if size <= self.pool.free:
            return self.pool.free
        return self.cache.available(size, _spared(source, copied))

    def _begin_pass(self, sequence: LiveSequence, source: CacheSource | None) -> None:
        """Begin an admitted sequence's pass behind the tokens that it takes over."""
        count = sequence.done = 0 if source is None else source.count
        if source is not None:
            sequence.memory.is_private |= source.is_private
            if source.is_shared:
                sequence.shared = source.shares
                for share in source.shares:
                    self.pool.retain(share.span)
        if sequence.cache_key is not None:
            document = None if source is None else source.document
            self.cache.use(document, len(sequence.tokens), count)
        if sequence.filter_layer is None or sequence.chosen is not None:
            sequence.state, sequence.num_reused = State.PREFILLING, count
            self._place_windows(sequence, source)
            return
        sequence.state, sequence.num_cached = State.FILTERING, count
        if sequence.segment_pass is not None:
            sequence.num_found = num_cached_tokens(self.cache, sequence)
        self.begin_load(sequence, count)

    def _place_windows(self, sequence: LiveSequence, source: CacheSource | None = None) -> None:
        """Say where a sequence's layers with a sliding window have their tokens from now on."""
        room = sequence.new_room(self._layout)
        if room is not None and source is not None:
            room = source.room_of(room)
        sequence.room = room

    def _make_room(
        self, sequence: LiveSequence, size: int, spared: list[CachedDocument]
    ) -> Span | None:
        """Evict documents until the sequence fits. None: only once memory is moved."""
        tenant = sequence.request.tenant
        self.cache.make_room(size, spared, tenant)
        span = self.pool.allocate(size)
        if span is None:
            self.cache.spare_moves(size, spared, tenant)
            span = self.pool.allocate(size)
        return span

    def _next_chunk(self, chunk_tokens: int) -> Chunk | None:
        """A chunk of the unfinished prompt whose turn it is, if there is one."""
        unfinished = [s for s in self.running if _takes_turns(s) and not s.awaits_source]
        if self._awaits_compaction:
            unfinished = [s for s in unfinished if s.open_tokens]
        if not unfinished:
            return None
        sequence = self._reading.choose(unfinished)
        if sequence.request.prompt_logprobs is not None:
            chunk_tokens = min(chunk_tokens, MAX_SCORED_TOKENS)
        if sequence.request.priority == LAST:
            chunk_tokens = min(chunk_tokens, MAX_IDLE_TOKENS)
        count = sequence.open_tokens or min(chunk_tokens, sequence.remaining)
        is_filtering = sequence.state is State.FILTERING
        if is_filtering and sequence.segment_pass is not None:
            return self._segment_chunk(sequence, sequence.segment_pass)
        return Chunk(
            sequence=sequence.order,
            start=sequence.done,
            count=count,
            is_last=sequence.done + count == sequence.pass_length,
            place=sequence.place,
            filter_layer=sequence.filter_layer if is_filtering else None,
            num_cached=sequence.num_cached,
            rope_tokens=sequence.rope_length,
        )

    def _segment_chunk(self, sequence: LiveSequence, reading: SegmentPass) -> Chunk:
        """The next group of segments. What is cached of it is looked up once."""
        find_segments(self.cache, self.pool, sequence)
        arrived = reading.arrived.get(reading.next_group)
        count = reading.num_tokens_of(reading.group)
        return Chunk(
            sequence=sequence.order,
            start=sequence.done,
            count=count,
            is_last=sequence.done + count == sequence.pass_length,
            place=KVPlace(sequence.memory.start, 0),
            filter_layer=reading.layer,
            num_cached=sequence.num_cached,
            segments=() if arrived else reading.reads(sequence.memory.start),
            num_asked=len(reading.plan.asked),
            arrived=tuple(zip(reading.group, arrived.summaries, strict=True)) if arrived else (),
        )

    def _advance(self, chunk: Chunk, output: StepOutput) -> None:
        number, sequence = chunk.sequence, self.sequences[chunk.sequence]
        sequence.done += chunk.count
        sequence.open_tokens = 0
        if chunk.segments and number not in output.failed_filters:
            leave_segments(self.cache, self.pool, sequence, chunk.segments)
        if chunk.arrived and number not in output.failed_filters:
            end_arrived(sequence)
        if number in output.kept:  # a failed filter ends this even before its last chunk
            is_complete = chunk.is_last and number not in output.failed_filters
            self._keep(sequence, output.kept[number], is_complete)
        elif chunk.is_last and not sequence.request.ends_when_read:
            sequence.generated += output.tokens[number]
            sequence.state = State.DECODING
            if sequence.evicts:
                sequence.done = sequence.num_kept
                self.pool.shrink(sequence.memory, sequence.kept_units(self._layout))

    def _keep(self, sequence: LiveSequence, kept: Kept, is_complete: bool) -> None:
        """Continue with the positions that a filter chose. Wait if they need more than is reserved.

        `is_complete`: the filter pass has computed all that it should, so the cache may have it.
        """
        limit = sequence.num_prompt if kept.has_failed else sequence.plan.budget.limit
        assert 0 < len(kept.ids) <= limit
        key, tokens = sequence.cache_key, sequence.tokens  # of the filter pass
        if sequence.segment_pass is not None:
            self.cache.use(None, sequence.segment_pass.num_tokens, sequence.num_cached)
            release_segments(self.pool, sequence)
        sequence.chosen, sequence.ids = kept.positions, kept.ids
        sequence.num_kept = len(kept.ids)
        sequence.done = 0
        needed = sequence.kept_units(self._layout)
        is_fitting = needed <= sequence.memory.size
        if is_complete and key is not None:
            pass_units = sequence.reading_units(self._layout, sequence.num_shared)
            leave_filter_pass(
                self.cache,
                self.pool,
                sequence,
                key,
                tokens,
                pass_units=pass_units,
                needed=needed if is_fitting else None,
            )
            note_held(self.cache, sequence, key, tokens)
        if is_fitting:
            self._release_shared(sequence)
            sequence.state = State.PREFILLING
            self._place_windows(sequence)
            self.pool.shrink(sequence.memory, needed)
            sequence.found, sequence.awaits_source = None, sequence.cache_key is not None
            return
        self._release(sequence)
        sequence.state = State.WAITING
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def _leave(self, sequence: LiveSequence) -> None:
        if sequence.state is State.FILTERING:
            leave_unfinished_pass(self.cache, self.pool, sequence, self._layout)
        elif sequence.state is not State.WAITING:
            leave_whole_prompt(self.cache, self.pool, sequence, self._layout)
            is_prompt = sequence.filter_layer is None or sequence.is_read_from_cache
            key = sequence.cache_key
            if is_prompt and key is not None and key.layer is None:
                note_held(self.cache, sequence, key, sequence.tokens)

    def _release(self, sequence: LiveSequence) -> None:
        """Free a sequence's memory, if it has any."""
        self._release_shared(sequence)
        release_segments(self.pool, sequence)
        if sequence.span is not None:
            self.pool.release(sequence.span)
            sequence.span = sequence.room = None

    def _release_shared(self, sequence: LiveSequence) -> None:
        """Give up what a filter pass shares with others."""
        for share in sequence.shared:
            self.pool.release(share.span)
        sequence.shared = ()


def _takes_turns(sequence: LiveSequence) -> bool:
    """Is its prompt being read, unless it waits for what the disk or another engine has of it?"""
    is_reading = sequence.state in (State.FILTERING, State.PREFILLING)
    return is_reading and not sequence.is_loading and not sequence.is_awaiting


def _is_first_beside(sequence: LiveSequence, reading: Iterable[tuple[LiveSequence, int]]) -> bool:
    tenant = sequence.request.tenant
    return not any(s.is_beside for s, _ in reading if s.request.tenant == tenant)


def _spans_of(sequence: LiveSequence) -> Iterator[Span]:
    """What a pass over a running sequence's prompt holds views of."""
    yield sequence.memory
    yield from (share.span for share in sequence.shared)
    yield from (share.span for share in found_segments(sequence))


def _decode_row(sequence: LiveSequence) -> DecodeRow:
    slot = sequence.next_slot
    return DecodeRow(
        sequence=sequence.order,
        token=sequence.generated[-1],
        slot=slot,
        position=slot + sequence.num_evicted,
        rope_tokens=sequence.rope_length,
        place=sequence.place,
    )


def _spared(source: CacheSource | None, copied: list[CachedDocument]) -> list[CachedDocument]:
    """Documents that must not give way to a sequence that takes over `source`."""
    document = None if source is None else source.document
    return copied if document is None else [*copied, document]
