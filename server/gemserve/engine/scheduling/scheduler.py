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
from collections.abc import Sequence as Ids

from gemserve.engine.cache.document_cache import CachedDocument, DocumentCache
from gemserve.engine.memory import MemoryPool
from gemserve.engine.reuse.lookup import (
    MAX_TIMES_PASSED,
    Source,
    awaits_leader,
    find_cached,
    find_source,
)
from gemserve.engine.reuse.storing import leave_filter_pass, leave_whole_prompt
from gemserve.engine.scheduling.fair_shares import ReadingShares, SlotShares
from gemserve.engine.sequence.sequence import Sequence, State
from gemserve.engine.sequence.step_plan import Chunk, Copy, Plan, StepOutput

# Tokens of a chunk if all of its tokens are scored, because each needs a row of logits.
MAX_SCORED_TOKENS = 256

# Once so many prompts are being read, admitting another one makes nothing faster: they are read one
# at a time. So no document gives way to it. Else a burst of requests empties the document cache,
# every question reads its document anew, and the server stays overloaded long after the burst.
MOST_READING = 8


class Scheduler:
    """Owns the states of all sequences and the bookkeeping of the memory pool."""

    def __init__(
        self, pool: MemoryPool, *, num_layers: int, max_running: int, cache_units: int = 0
    ) -> None:
        """`cache_units`: how much of the pool the document cache may hold."""
        self.pool = pool
        self.cache = DocumentCache(pool, cache_units)
        # looks for more of an admitted sequence on the disk: see `DiskCache.begin_load`
        self.begin_load: Callable[[Sequence, int], object] = lambda sequence, num_cached: None
        self._num_layers = num_layers
        self._max_running = max_running
        self._is_first_next = True
        self._awaits_compaction = False
        self._reading = ReadingShares()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def fits_ever(self, sequence: Sequence) -> bool:
        """Could this sequence run if it were alone?"""
        return sequence.peak_units(self._num_layers) <= self.pool.capacity

    def add(self, sequence: Sequence) -> None:
        assert sequence.state is State.WAITING
        assert self.fits_ever(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def schedule(self, chunk_tokens: int, *, is_decode_due: bool) -> Plan:
        """Admit what fits, then plan one step.

        Decoding sequences advance if that is due or there is nothing to read. Otherwise a chunk of
        at most `chunk_tokens` of an unfinished prompt advances.
        """
        assert chunk_tokens > 0
        copies = self._admit()
        moves = self.pool.take_changes()
        decodes = tuple(s for s in self.running if s.state is State.DECODING)
        chunk = None if decodes and is_decode_due else self._next_chunk(chunk_tokens)
        return Plan(tuple(moves), tuple(copies), decodes if chunk is None else (), chunk)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Advance every sequence of the plan by what its step produced."""
        if plan.chunk is not None and plan.chunk.sequence not in output.failures:
            if output.is_chunk_done:
                self._advance(plan.chunk, output)
            else:
                plan.chunk.sequence.open_tokens = plan.chunk.count
        for sequence in plan.decodes:
            if sequence not in output.failures:
                sequence.generated.append(output.tokens[sequence])
        for sequence in output.finished:
            self.finish(sequence)
        for sequence in output.failures:
            self.finish(sequence, has_failed=True)

    def finish(self, sequence: Sequence, has_failed: bool = False) -> None:
        """End a sequence in any state and free its memory. Idempotent.

        The document cache may have what is left of a prompt that was read whole.
        """
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.DECODING and not has_failed:
            leave_whole_prompt(self.cache, self.pool, sequence, self._num_layers)
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        self._release(sequence)

    def forget_documents(self, ids: Collection[str]) -> None:
        """Drop what is cached of stored documents; passes that contain them store nothing."""
        self.cache.forget(ids)
        for sequence in self.waiting:
            sequence.found = None

    def check_integrity(self) -> None:
        """Check that states, queues and memory agree. Raises `AssertionError`."""
        self.pool.check_integrity()
        owners = {id(sequence.span) for sequence in self.running}
        assert len(owners) == len(self.running), "two sequences share one span"
        held = 0
        for sequence in self.running:
            assert sequence.state in (State.FILTERING, State.PREFILLING, State.DECODING)
            held += sequence.memory.size
            needed = sequence.kept_units(self._num_layers)
            if sequence.is_reading:
                needed = sequence.peak_units(self._num_layers)
            assert sequence.memory.size == needed, (sequence.memory, needed)
            assert 0 <= sequence.done <= sequence.pass_length
            assert len(sequence.generated) <= sequence.request.sampling.max_tokens
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.span is None
        self.cache.check_integrity()
        held += self.cache.used
        assert held == self.pool.used, f"sequences and cache hold {held}, the pool {self.pool.used}"

    def _admit(self) -> list[Copy]:
        """Admit whatever fits, in fair order. Later requests may overtake a large one.

        Documents in the cache give way, unless `MOST_READING` prompts are being read. Scattered
        free units are made one by compaction, which waits until no chunk is under way, because its
        pass holds views of the memory. A step copies one document at most, so that nobody's next
        token waits for several.
        """
        copies: list[Copy] = []
        copied: list[CachedDocument] = []  # which must stay until this plan has been carried out
        self._awaits_compaction = False
        if not self.waiting or len(self.running) >= self._max_running:
            return []
        slots = SlotShares(self.running, self._max_running)
        num_reading = sum(sequence.state is not State.DECODING for sequence in self.running)
        for sequence in (order := slots.order(self.waiting)):
            if not slots.may_take(sequence):
                continue
            size = sequence.reserved_units(self._num_layers)
            can_evict = num_reading < MOST_READING
            if size <= (self.cache.available(size, copied) if can_evict else self.pool.free):
                if awaits_leader(self.cache, sequence, self.running, self._num_layers):
                    continue
                if copies and find_source(self.cache, sequence, self.running) is not None:
                    break
                if can_evict:
                    self._make_room(sequence, size, copied)
            if size > self.pool.free:
                if sequence.times_passed >= MAX_TIMES_PASSED:
                    break
                continue
            span = self.pool.allocate(size)
            if span is None:
                if any(s.open_tokens for s in self.running):
                    self._awaits_compaction = True
                    break
                self.pool.compact(size)
                span = self.pool.allocate(size)
                assert span is not None
            span.is_private = bool(sequence.request.documents)
            for earlier in order[: order.index(sequence)]:
                earlier.times_passed += earlier.state is State.WAITING
            slots.take(sequence)
            num_reading += 1
            source = find_source(self.cache, sequence, self.running)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.span, sequence.found = span, None
            sequence.most_held = max(sequence.most_held, size)
            self._begin_pass(sequence, source)
            if source is not None:
                copies.append(source.copy_to(sequence, self._num_layers))
                copied += [] if source.document is None else [source.document]
        return copies

    def _begin_pass(self, sequence: Sequence, source: Source | None) -> None:
        """Begin an admitted sequence's pass behind the tokens that it takes over."""
        count = sequence.done = 0 if source is None else source.count
        if sequence.cache_key is not None:
            document = None if source is None else source.document
            self.cache.use(document, len(sequence.tokens), count)
        if sequence.filter_layer is None or sequence.chosen is not None:
            sequence.state, sequence.num_reused = State.PREFILLING, count
            return
        sequence.state, sequence.num_cached = State.FILTERING, count
        self.begin_load(sequence, count)

    def _make_room(self, sequence: Sequence, size: int, spared: list[CachedDocument]) -> None:
        """Evict documents until the sequence fits, the one that it begins like last."""
        document, _ = find_cached(self.cache, sequence)
        also_spared = spared if document is None else [*spared, document]
        self.cache.make_room(size, also_spared, sequence.request.tenant)
        self.cache.spare_moves(size, also_spared, sequence.request.tenant)
        self.cache.make_room(size, spared, sequence.request.tenant)

    def _next_chunk(self, chunk_tokens: int) -> Chunk | None:
        """A chunk of the first unfinished prompt, then of the one nearest its end, in turn.

        So a huge prompt always advances, and short ones do not wait behind it. A chunk that has
        begun is finished before another prompt's begins, so few passes hold memory at once.
        """
        reading = (State.FILTERING, State.PREFILLING)
        unfinished = [s for s in self.running if s.state in reading and not s.is_loading]
        if self._awaits_compaction:
            unfinished = [s for s in unfinished if s.open_tokens]
        if not unfinished:
            return None
        first = self._reading.first(unfinished)
        others = [s for s in unfinished if s is not first]
        sequence = first
        if others and not self._is_first_next:
            sequence = min(others, key=lambda s: (s.open_tokens == 0, s.remaining))
        self._is_first_next = not self._is_first_next
        if sequence.request.prompt_logprobs is not None:
            chunk_tokens = min(chunk_tokens, MAX_SCORED_TOKENS)
        count = sequence.open_tokens or min(chunk_tokens, sequence.remaining)
        return Chunk(
            sequence=sequence,
            start=sequence.done,
            count=count,
            is_filter=sequence.state is State.FILTERING,
            is_last=sequence.done + count == sequence.pass_length,
        )

    def _advance(self, chunk: Chunk, output: StepOutput) -> None:
        sequence = chunk.sequence
        self._reading.note(sequence, chunk.count)
        sequence.done += chunk.count
        sequence.open_tokens = 0
        if sequence in output.kept:  # a failed filter ends this even before its last chunk
            is_complete = chunk.is_last and sequence not in output.failed_filters
            self._keep(sequence, output.kept[sequence], is_complete)
        elif chunk.is_last:
            sequence.generated.append(output.tokens[sequence])
            sequence.state = State.DECODING
            if sequence.evicts:
                sequence.done = sequence.num_kept
                self.pool.shrink(sequence.memory, sequence.kept_units(self._num_layers))

    def _keep(self, sequence: Sequence, kept: Ids[int], is_complete: bool) -> None:
        """Continue with the positions that a filter chose. Wait if they need more than is reserved.

        `is_complete`: the filter pass has computed all that it should, so the cache may have it.
        """
        assert 0 < len(kept) <= sequence.plan.budget.limit
        key, tokens = sequence.cache_key, sequence.tokens  # of the filter pass
        sequence.chosen = kept
        sequence.num_kept = len(kept)
        sequence.ids = [sequence.request.prompt_ids[p] for p in kept]
        sequence.done = 0
        needed = sequence.kept_units(self._num_layers)
        is_fitting = needed <= sequence.memory.size
        if is_complete and key is not None:
            pass_units = sequence.reading_units(self._num_layers)
            leave_filter_pass(
                self.cache,
                self.pool,
                sequence,
                key,
                tokens,
                pass_units=pass_units,
                needed=needed if is_fitting else None,
            )
        if is_fitting:
            sequence.state = State.PREFILLING
            self.pool.shrink(sequence.memory, needed)
            return
        self._release(sequence)
        sequence.state = State.WAITING
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def _release(self, sequence: Sequence) -> None:
        """Free a sequence's memory, if it has any."""
        if sequence.span is not None:
            self.pool.release(sequence.span)
            sequence.span = None
