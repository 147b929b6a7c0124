"""What the runner keeps of one sequence from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemserve.engine.running.answer_attention import AnswerWatch
from gemserve.engine.running.passes import Pass
from gemserve.model.kv import KVSpan
from gemserve.model.query_tap import FilterTap, QueryTap
from gemserve.types import TokenLogprob


@dataclass(slots=True)
class ChunkPass:
    """A chunk's pass that has begun. Without a `filter_tap` it is a prefill pass."""

    forward: Pass
    filter_tap: FilterTap | None = None


@dataclass(slots=True)
class RunnerState:
    """One sequence's unfinished pass, and what its passes have collected.

    `query_tap` collects queries until a filter or an evictor has chosen. `scores` are the
    log-probabilities of the prompt so far. `kv` has the keys and values of all layers. It is valid
    while the sequence's memory begins at `kv_start`. `watch` looks at the answer, if it is wanted.
    """

    chunk_pass: ChunkPass | None = None
    query_tap: QueryTap | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    kv: KVSpan | None = None
    watch: AnswerWatch | None = None
    kv_start: int = 0
