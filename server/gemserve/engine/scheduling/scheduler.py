"""Decides what runs next: a decode step when one is due, else a slice of a prompt's pass.

A step is one token of every decoding sequence, or a slice of one prompt's pass. A pass goes over a
chunk of tokens, which may take several steps to get through its layers.

Admission reserves a request's peak memory. So no running request lacks memory, and no two requests
wait for each other. A request that turns out to need more gives back its memory and is admitted
again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection

from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import DocumentCache
from gemserve.engine.memory import KVPlace, MemoryPool, Span
from gemserve.engine.reuse.lookup import (
    CacheSource,
    answering_of,
    find_source,
    leave_filter_pass,
    leave_unfinished_pass,
    leave_whole_prompt,
    note_held,
)
from gemserve.engine.reuse.segments import (
    end_arrived,
    find_segments,
    leave_segments,
    num_cached_tokens,
    release_segments,
)
from gemserve.engine.scheduling.admission import Admission, takes_turns
from gemserve.engine.scheduling.fair_shares import ReadingShares
from gemserve.engine.scheduling.prompt_lookup import PromptLookup
from gemserve.engine.scheduling.request_memory import RequestMemory, spans_of
from gemserve.engine.scheduling.time_shares import Portion, TimeTurns
from gemserve.engine.sequence.segment_pass import SegmentPass
from gemserve.engine.sequence.sequence import LAST, LiveSequence, State
from gemserve.engine.sequence.step_plan import Chunk, DecodeRow, Kept, StepOutput, StepPlan
from gemserve.kv_layout import KVLayout

# Tokens of a chunk if all of its tokens are scored, because each needs a row of logits.
MAX_SCORED_TOKENS = 256
MAX_IDLE_TOKENS = 128  # of a chunk that is read in idle time: a request waits for its end


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
        self._layout, self._lookup = layout or KVLayout(growing=num_layers), lookup
        self._admission = Admission(
            pool,
            self.cache,
            RequestMemory(pool, self.cache, self._layout, shape),
            layout=self._layout,
            max_running=max_running,
            begin=self._begin,
        )
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
        several tenants share the engine, those whose turn it is (`TimeTurns`). Otherwise a
        chunk of at most `chunk_tokens` of an unfinished prompt advances.
        """
        assert chunk_tokens > 0
        self._reading.parts = {} if portion is None else portion.reading_of
        taken = self._take_over()
        is_shared = portion is not None
        self._admission.admit(self.waiting, self.running, taken, is_shared=is_shared)
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

    def is_led(self, sequence: LiveSequence) -> bool:
        """Does a waiting sequence wait for another's pass, which reads what it begins with?"""
        return sequence.state is State.WAITING and self._admission.is_led(sequence, self.running)

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
            owned += spans_of(sequence)
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

    def _begin(self, sequence: LiveSequence, span: Span, source: CacheSource | None) -> None:
        """Run a waiting sequence in `span` from now on, behind what it takes over."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.span, sequence.found = span, None
        span.is_private = bool(sequence.request.documents)
        sequence.most_held = max(sequence.most_held, span.size)
        self._begin_pass(sequence, source)

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

    def _next_chunk(self, chunk_tokens: int) -> Chunk | None:
        """A chunk of the unfinished prompt whose turn it is, if there is one."""
        unfinished = [s for s in self.running if takes_turns(s) and not s.awaits_source]
        if self._admission.awaits_compaction:
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
        kept = output.kept.get(number)
        has_failed = kept is not None and kept.has_failed
        if chunk.segments and not has_failed:
            leave_segments(self.cache, self.pool, sequence, chunk.segments)
        if chunk.arrived and not has_failed:
            end_arrived(sequence)
        if kept is not None:  # a failed filter ends this even before its last chunk
            self._keep(sequence, kept, chunk.is_last and not has_failed)
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
        is_over = sequence.request.selects_only  # in this step: it needs no memory for an answer
        is_fitting = not is_over and needed <= sequence.memory.size
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
        if is_over:
            return
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
