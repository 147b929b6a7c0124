"""Decides what runs next: a decode step when one is due, else a slice of a prompt's pass.

A step is one token of every decoding sequence, or a slice of one prompt's pass. A pass goes over a
chunk of tokens, which may take several steps to get through its layers.

Admission reserves a request's peak memory. So no running request lacks memory, and no two requests
wait for each other. A request that turns out to need more gives back its memory and is admitted
again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from gemserve.engine.memory import MemoryPool, Move
from gemserve.engine.sequence import Sequence, State

# Once this many later requests have overtaken a waiting request, no further one may.
MAX_TIMES_PASSED = 64
# Tokens of a chunk if all of its tokens are scored, because each needs a row of logits.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..start+count−1 of a sequence's filter or prefill pass."""

    sequence: Sequence
    start: int
    count: int
    is_filter: bool
    is_last: bool

    @property
    def filter_layer(self) -> int | None:
        """The layer at which this chunk's pass ends. None: a prefill pass through all layers."""
        return self.sequence.filter_layer if self.is_filter else None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: either `decodes` or `chunk`. The moves of memory come first."""

    moves: tuple[Move, ...]
    decodes: tuple[Sequence, ...]
    chunk: Chunk | None

    @property
    def is_empty(self) -> bool:
        return not self.decodes and self.chunk is None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced. Every sequence in `decodes` advances unless it is in `failures`.

    `is_chunk_done`: the plan's chunk has passed all its layers and need not be planned again.
    `tokens`: one for each decoding sequence and for a prefill that ended. `kept`: the ascending
    positions that a filter pass chose. `finished`: sequences that ended with this step.
    """

    is_chunk_done: bool = True
    tokens: Mapping[Sequence, int] = field(default_factory=dict)
    kept: Mapping[Sequence, Ids[int]] = field(default_factory=dict)
    finished: frozenset[Sequence] = frozenset()
    failures: frozenset[Sequence] = frozenset()


class Scheduler:
    """Owns the states of all sequences and the bookkeeping of the memory pool."""

    def __init__(self, pool: MemoryPool, *, num_layers: int, max_running: int) -> None:
        self.pool = pool
        self._num_layers = num_layers
        self._max_running = max_running
        self._is_first_next = True
        self._awaits_compaction = False
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
        moves = tuple(self._admit())
        decodes = tuple(s for s in self.running if s.state is State.DECODING)
        chunk = None if decodes and is_decode_due else self._next_chunk(chunk_tokens)
        return Plan(moves, decodes if chunk is None else (), chunk)

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
        for sequence in (*output.finished, *output.failures):
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state and free its memory. Idempotent."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        self._release(sequence)

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
        assert held == self.pool.used, f"running sequences hold {held}, the pool {self.pool.used}"

    def _admit(self) -> list[Move]:
        """Admit whatever fits, by priority and arrival. Later requests may overtake a large one.

        If enough units are free but scattered, the pool is compacted. That waits until no chunk is
        under way, because its pass holds views of the memory at its present place.
        """
        moves: list[Move] = []
        self._awaits_compaction = False
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_running:
                break
            size = sequence.reserved_units(self._num_layers)
            if size > self.pool.free:
                if sequence.times_passed >= MAX_TIMES_PASSED:
                    break
                continue
            span = self.pool.allocate(size)
            if span is None:
                if any(s.open_tokens for s in self.running):
                    self._awaits_compaction = True
                    break
                moves += self.pool.compact()
                span = self.pool.allocate(size)
                assert span is not None
            for earlier in self.waiting:
                if earlier is sequence:
                    break
                earlier.times_passed += 1
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.span = span
            sequence.most_held = max(sequence.most_held, size)
            sequence.done = 0
            has_chosen = sequence.filter_layer is None or sequence.chosen is not None
            sequence.state = State.PREFILLING if has_chosen else State.FILTERING
        return moves

    def _next_chunk(self, chunk_tokens: int) -> Chunk | None:
        """A chunk of the first unfinished prompt by rank, then of the one nearest its end, in turn.

        So a huge prompt always advances, and short ones do not wait behind it. A chunk that has
        begun is finished before another prompt's begins, so few passes hold memory at once.
        """
        unfinished = [s for s in self.running if s.state in (State.FILTERING, State.PREFILLING)]
        if self._awaits_compaction:
            unfinished = [s for s in unfinished if s.open_tokens]
        if not unfinished:
            return None
        first = min(unfinished, key=lambda s: s.rank)
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
        sequence.done += chunk.count
        sequence.open_tokens = 0
        if sequence in output.kept:  # a failed filter ends this even before its last chunk
            self._keep(sequence, output.kept[sequence])
        elif chunk.is_last:
            sequence.generated.append(output.tokens[sequence])
            sequence.state = State.DECODING
            if sequence.evicts:
                sequence.done = sequence.num_kept
                self.pool.shrink(sequence.memory, sequence.kept_units(self._num_layers))

    def _keep(self, sequence: Sequence, kept: Ids[int]) -> None:
        """Continue with the positions that a filter chose.

        Wait if they need more than is reserved.
        """
        assert 0 < len(kept) <= sequence.plan.budget.limit
        sequence.chosen = kept
        sequence.num_kept = len(kept)
        sequence.ids = [sequence.request.prompt_ids[p] for p in kept]
        sequence.done = 0
        needed = sequence.kept_units(self._num_layers)
        if needed <= sequence.memory.size:
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
