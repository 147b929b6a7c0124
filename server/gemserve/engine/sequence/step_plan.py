"""What one step runs, and what came of it, as ids, offsets and numbers. No torch.

A sequence has a number, by which scheduler and runner mean the same one. The runner knows what
`Task` says of it, and else only what plans say. All of it can be pickled, so that a runner may be
in another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gemserve.contract.events import TokenLogprob
from gemserve.contract.filter_plan import KeysRead, QueriesRead, SummaryArrays
from gemserve.contract.requests import Request
from gemserve.contract.scores import FilterScores
from gemserve.cost import ModelShape
from gemserve.engine.memory import Change, KVPlace, Stretch
from gemserve.engine.sequence.segment_pass import SegmentRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens start..start+count−1 of a sequence's filter or prefill pass.

    `place`: where the pass's keys and values are. `filter_layer`: the layer at which the pass ends;
    None: a prefill pass through all layers. `num_cached`: tokens that a filter pass has taken over.
    `rope_tokens`: positions up to the end of the longest answer, for rope that depends on length.
    `segments`: what a filter pass reads that goes over segments; its tokens count from the first
    segment on. `num_asked`: tokens that are read behind each of them, also behind those that are
    cached. `arrived`: what another engine has read instead, by the segments' indexes.
    """

    sequence: int
    start: int
    count: int
    is_last: bool
    place: KVPlace
    filter_layer: int | None = None
    num_cached: int = 0
    rope_tokens: int = 0
    segments: tuple[SegmentRead, ...] = ()
    num_asked: int = 0
    arrived: tuple[tuple[int, SummaryArrays], ...] = ()

    @property
    def is_filter(self) -> bool:
        return self.filter_layer is not None

    def cost(self, shape: ModelShape) -> float:
        """FLOPs of this chunk's forward pass; 0 if all of its segments are known."""
        if self.arrived:
            return 0.0
        if self.filter_layer is not None and self.segments:
            layer, counts = self.filter_layer, [read.text.count for read in self.segments]
            fresh = [read.text.count for read in self.segments if not read.is_cached]
            if not fresh:
                return 0.0
            asking = sum(shape.filter_chunk(count, self.num_asked, layer) for count in counts)
            return asking + sum(shape.filter_chunk(0, count, layer) for count in fresh)
        if self.filter_layer is not None:
            return shape.filter_chunk(self.start, self.count, self.filter_layer)
        return shape.prefill_chunk(self.start, self.count)


class DecodeRow(NamedTuple):
    """The newest token of a decoding sequence. Its keys and values go to `slot`.

    `position` is its place in the text, which is larger after an eviction. `rope_tokens`: see
    `Chunk`. `place`: where the sequence's keys and values are. `proposed`: what may follow the
    token, and is tried in the same step, in the slots behind it.
    """

    sequence: int
    token: int
    slot: int
    position: int
    rope_tokens: int
    place: KVPlace
    proposed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the tokens in `source` to the beginning of a sequence's own room, `target`.

    `token_units`: units of each token there. `windows`: what is copied from where to where in
    layers with a sliding window, which have `window_units` units of each token.
    """

    sequence: int
    source: tuple[Stretch, ...]
    target: KVPlace
    token_units: int
    windows: tuple[tuple[Stretch, Stretch], ...] = ()
    window_units: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: either `decodes` or `chunk`. The changes of memory come first, then the copies."""

    moves: tuple[Change, ...] = ()
    copies: tuple[Copy, ...] = ()
    decodes: tuple[DecodeRow, ...] = ()
    chunk: Chunk | None = None

    @property
    def is_empty(self) -> bool:
        return not self.decodes and self.chunk is None


@dataclass(frozen=True, slots=True)
class Task:
    """What the runner is told of a sequence before the first plan that names it.

    The request has a filter plan. Its adapter is an `AdapterName`.
    """

    sequence: int
    request: Request


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """`is_complete`: with it the answer is all that its grammar allows."""

    token: int
    logprob: TokenLogprob | None = None
    is_complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The positions that a filter chose, ascending: see `filtering.selector.Choice`.

    `ids`: what the answer is generated from: the tokens at these positions, and those `added`
    between them, by their indexes in `ids`. `has_failed`: all of the prompt's, because the filter
    failed. `scores`: what the reply shows of them, if the request asks for it. `best`: the kept
    passages, the best first.
    """

    positions: Sequence[int]
    ids: Sequence[int]
    added: Sequence[int] = ()
    coverage: float | None = None
    is_diffuse: bool = False
    has_failed: bool = False
    scores: FilterScores | None = None
    best: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class RunOutput:
    """What the runner returns for one step: results of sequences by their numbers.

    `drawn`: one token of a sequence, and one more for each that was proposed and drawn.
    `scored` has the log-probabilities of prompts that were read whole. `evicted` lists sequences
    whose keys and values were partly dropped; each of their layers keeps different positions.
    `summarized` and `vectors` have what was read of those that want no more.
    `failures` says what went wrong. `is_chunk_done`: the plan's chunk has passed all its layers,
    which took `pass_s` seconds over all its steps. `taken_s`: seconds of this step. `retried`: what
    failed for several sequences together, and was done for each alone: a name and the error.
    """

    started_s: float = 0.0
    drawn: dict[int, list[DrawnToken]] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    scored: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    summarized: dict[int, tuple[SummaryArrays, ...]] = field(default_factory=dict)
    vectors: dict[int, KeysRead | QueriesRead] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    is_chunk_done: bool = False
    pass_s: float = 0.0
    taken_s: float = 0.0
    retried: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the scheduler is told of a step. All of its decodes advance but those in `failures`.

    `is_chunk_done`: the plan's chunk has passed all its layers and need not be planned again.
    `taken_s`: seconds of the step; 1 if nobody measures, so that steps count alike.
    `tokens`: one or more of each decoding sequence and of a prefill that ended. `kept`: what a
    filter pass chose, or all where it failed. `finished`: sequences that ended with this step.
    """

    is_chunk_done: bool = True
    taken_s: float = 1.0
    tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    kept: Mapping[int, Kept] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    failures: frozenset[int] = frozenset()
