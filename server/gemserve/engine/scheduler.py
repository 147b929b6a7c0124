"""What runs next: decode first, then pieces of prompts, within a budget. No torch.

A step holds one token of every decoding sequence, and chunks of filter and prefill passes worth at
most `budget` units of cost. Admission reserves a request's peak memory, so nothing that runs can
starve for it and no two requests can wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gemserve.engine.memory import MemoryPool, Move
from gemserve.engine.sequence import Sequence, State

# A waiting request that this many later ones have overtaken is overtaken no more.
MAX_TIMES_PASSED = 64


class Costs(Protocol):
    """What a chunk costs, in any unit; the budget has the same one."""

    def filter_chunk(self, start: int, count: int, layer: int) -> float: ...

    def prefill_chunk(self, start: int, count: int) -> float: ...


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
    """One step. `moves` are carried out before anything else."""

    moves: tuple[Move, ...]
    decodes: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced. Every sequence of the plan advanced, unless it is in `failures`.

    `tokens`: drawn for decoding sequences and for prefills that ended; `kept`: positions chosen by
    filter passes that ended; `finished`: sequences that ended with this step's token.
    """

    tokens: Mapping[Sequence, int] = field(default_factory=dict)
    kept: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)
    finished: frozenset[Sequence] = frozenset()
    failures: frozenset[Sequence] = frozenset()


class Scheduler:
    """Owns the states of all sequences and the memory pool's bookkeeping."""

    def __init__(
        self, pool: MemoryPool, costs: Costs, *, num_layers: int, max_running: int, min_chunk: int
    ) -> None:
        self.pool = pool
        self._costs = costs
        self._num_layers = num_layers
        self._max_running = max_running
        self._min_chunk = min_chunk
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
        self.waiting.append(sequence)

    def schedule(self, budget: float) -> Plan:
        """Admit what fits, then plan one step of at most `budget` cost in chunks.

        At least one chunk of `min_chunk` tokens is planned if any prompt is unfinished.
        """
        moves = self._admit()
        decodes = tuple(s for s in self.running if s.state is State.DECODING)
        return Plan(tuple(moves), decodes, tuple(self._chunks(budget)))

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Advance every sequence of the plan by what its step produced."""
        for chunk in plan.chunks:
            if chunk.sequence not in output.failures:
                self._advance(chunk, output)
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
        """Admit in order of arrival whatever fits; what does not fit is overtaken, for a while.

        Where the free units suffice but lie scattered, the pool is compacted.
        """
        moves: list[Move] = []
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_running:
                break
            size = sequence.peak_units(self._num_layers)
            if size > self.pool.free:
                if sequence.times_passed >= MAX_TIMES_PASSED:
                    break
                continue
            span = self.pool.allocate(size)
            if span is None:
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
            sequence.done = 0
            is_filtered = sequence.filter_layer is not None
            sequence.state = State.FILTERING if is_filtered else State.PREFILLING
        return moves

    def _chunks(self, budget: float) -> list[Chunk]:
        """Half of the budget to the oldest unfinished prompt, the rest to those nearest their end.

        So a huge prompt always advances, and short ones do not wait behind it.
        """
        unfinished = [s for s in self.running if s.state in (State.FILTERING, State.PREFILLING)]
        if not unfinished:
            return []
        oldest = min(unfinished, key=lambda s: s.order)
        others = sorted((s for s in unfinished if s is not oldest), key=lambda s: s.remaining)
        share = budget / 2 if others else budget
        chunks = [self._chunk(oldest, share)]
        left = budget - self._cost(oldest, chunks[0].count)
        for sequence in others:
            if left <= 0:
                break
            chunk = self._chunk(sequence, left)
            chunks.append(chunk)
            left -= self._cost(sequence, chunk.count)
        return chunks

    def _chunk(self, sequence: Sequence, budget: float) -> Chunk:
        """The longest chunk within `budget`, but at least `min_chunk` tokens."""
        low = min(self._min_chunk, sequence.remaining)
        high = sequence.remaining
        while low < high:
            middle = (low + high + 1) // 2
            if self._cost(sequence, middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return Chunk(
            sequence=sequence,
            start=sequence.done,
            count=low,
            is_filter=sequence.state is State.FILTERING,
            is_last=sequence.done + low == sequence.pass_length,
        )

    def _cost(self, sequence: Sequence, count: int) -> float:
        if sequence.state is State.FILTERING:
            assert sequence.filter_layer is not None
            return self._costs.filter_chunk(sequence.done, count, sequence.filter_layer)
        return self._costs.prefill_chunk(sequence.done, count)

    def _advance(self, chunk: Chunk, output: StepOutput) -> None:
        sequence = chunk.sequence
        sequence.done += chunk.count
        if not chunk.is_last:
            return
        if chunk.is_filter:
            kept = output.kept[sequence]
            assert len(kept) == sequence.num_kept
            sequence.ids = [sequence.request.prompt_ids[p] for p in kept]
            sequence.state = State.PREFILLING
            sequence.done = 0
            assert sequence.span is not None
            self.pool.shrink(sequence.span, sequence.kept_units(self._num_layers))
        else:
            sequence.generated.append(output.tokens[sequence])
            sequence.state = State.DECODING
            if sequence.evicts:
                assert sequence.span is not None
                sequence.done = sequence.num_kept
                self.pool.shrink(sequence.span, sequence.kept_units(self._num_layers))
