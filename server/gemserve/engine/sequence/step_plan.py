"""What the scheduler plans for one step, and what it is told of the result. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from gemserve.cost import ModelShape
from gemserve.engine.memory import Change, Span
from gemserve.engine.sequence.sequence import Sequence


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

    def cost(self, shape: ModelShape) -> float:
        """FLOPs of this chunk's forward pass."""
        if self.filter_layer is not None:
            return shape.filter_chunk(self.start, self.count, self.filter_layer)
        return shape.prefill_chunk(self.start, self.count)


@dataclass(frozen=True, slots=True)
class Copy:
    """Take over the first `count` of the `capacity` tokens in `source` for a sequence's pass.

    `token_units`: units of each token, as in `CacheKey.token_units`.
    """

    source: Span
    capacity: int
    sequence: Sequence
    count: int
    token_units: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: either `decodes` or `chunk`. The changes of memory come first, then the copies."""

    moves: tuple[Change, ...]
    copies: tuple[Copy, ...]
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
    positions that a filter pass chose, or all where it failed (`failed_filters`). `finished`:
    sequences that ended with this step.
    """

    is_chunk_done: bool = True
    tokens: Mapping[Sequence, int] = field(default_factory=dict)
    kept: Mapping[Sequence, Ids[int]] = field(default_factory=dict)
    failed_filters: frozenset[Sequence] = frozenset()
    finished: frozenset[Sequence] = frozenset()
    failures: frozenset[Sequence] = frozenset()
