"""What runs next: decode steps when they are due, and between them pieces of prompts. No torch.

A step is one token of every decoding sequence, or a slice of one prompt's pass: over a chunk of
tokens, which may take several steps to get through its layers. Admission reserves a request's peak
memory, so nothing that runs can starve for it and no two requests can wait for each other. One that
turns out to need more gives back what it has, and is admitted again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from gemserve.engine.memory import MemoryPool, Move
from gemserve.engine.sequence import Sequence, State

# A waiting request that this many later ones have overtaken is overtaken no more.
MAX_TIMES_PASSED = 64
# Of a prompt whose every token is scored: a row of logits each.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..start+count−1 of a sequence's filter or prefill pass."""

    sequence: Sequence
    start: int
    count: int
    is_filter: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: `decodes` or `chunk`. `moves` are carried out before."""

    moves: tuple[Move, ...]
    decodes: tuple[Sequence, ...]
    chunk: Chunk | None

    @property
    def is_empty(self) -> bool:
        return not self.decodes and self.chunk is None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced. Every sequence that decoded advanced, unless it is in `failures`.

    `is_chunk_done`: the plan's chunk got through all its layers, and need not be planned again.
    `tokens`: drawn for decoding sequences and for prefills that ended; `kept`: positions chosen by
    filter passes that ended, ascending; `finished`: sequences that ended with this step's token.
    """

    is_chunk_done: bool = True
    tokens: Mapping[Sequence, int] = field(default_factory=dict)
    kept: Mapping[Sequence, Ids[int]] = field(default_factory=dict)
    finished: frozenset[Sequence] = frozenset()
    failures: frozenset[Sequence] = frozenset()


class Scheduler:
    """Owns the states of all sequences and the memory pool's bookkeeping."""

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

        Decoding sequences go on if that is due or there is nothing to read; else a chunk of at most
        `chunk_tokens` of an unfinished prompt does.
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
        """End a sequence in whatever state and free its memory. Idempotent."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state = State.FINISHED
        if sequence.span is not None:
            self.pool.release(sequence.span)
            sequence.span = None

    def check_integrity(self) -> None:
        """Prove that states, queues and memory agree. Raises `AssertionError`."""
        self.pool.check_integrity()
        owners = {id(sequence.span) for sequence in self.running}
        assert len(owners) == len(self.running), "two sequences own one span"
        held = 0
        for sequence in self.running:
            assert sequence.state in (State.FILTERING, State.PREFILLING, State.DECODING)
            assert sequence.span is not None
            held += sequence.span.size
            needed = sequence.kept_units(self._num_layers)
            if sequence.is_reading:
                needed = sequence.peak_units(self._num_layers)
            assert sequence.span.size == needed, (sequence.span, needed)
            assert 0 <= sequence.done <= sequence.pass_length
            assert len(sequence.generated) <= sequence.request.sampling.max_tokens
        for sequence in self.waiting:
            assert sequence.state is State.WAITING
            assert sequence.span is None
        assert held == self.pool.used, f"running sequences hold {held}, the pool {self.pool.used}"

    def _admit(self) -> list[Move]:
        """Admit by priority and arrival whatever fits; what does not is overtaken, for a while.

        Where the free units suffice but lie scattered, the pool is compacted: as soon as no chunk
        is under way, since its pass points to where things are.
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
        """In turn of the unfinished prompt that is first by rank and of the one nearest its end.

        So a huge prompt always advances, and short ones do not wait behind it. A chunk under way is
        brought to its end before another prompt's begins: what passes hold stays bounded.
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
        if sequence in output.kept:  # without the rest of its pass, if that has failed
            self._keep(sequence, output.kept[sequence])
        elif chunk.is_last:
            sequence.generated.append(output.tokens[sequence])
            sequence.state = State.DECODING
            if sequence.evicts:
                assert sequence.span is not None
                sequence.done = sequence.num_kept
                self.pool.shrink(sequence.span, sequence.kept_units(self._num_layers))

    def _keep(self, sequence: Sequence, kept: Ids[int]) -> None:
        """Go on with what a filter has chosen; with more than was reserved for, once that fits."""
        assert sequence.span is not None
        assert 0 < len(kept) <= sequence.plan.budget.limit
        sequence.chosen = kept
        sequence.num_kept = len(kept)
        sequence.ids = [sequence.request.prompt_ids[p] for p in kept]
        sequence.done = 0
        needed = sequence.kept_units(self._num_layers)
        if needed <= sequence.span.size:
            sequence.state = State.PREFILLING
            self.pool.shrink(sequence.span, needed)
            return
        self.pool.release(sequence.span)
        sequence.span = None
        sequence.state = State.WAITING
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=lambda s: s.rank)
