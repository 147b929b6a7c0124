"""What the runner returns for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemserve.decoding.sampling import Draw
from gemserve.engine.sequence.sequence import Sequence
from gemserve.filtering.selector import Choice
from gemserve.types import TokenLogprob


@dataclass(slots=True)
class RunOutput:
    """The results of a plan's sequences: a token each, a choice of positions, or an error.

    `scored` has the log-probabilities of prompts that were read whole. `evicted` lists sequences
    whose keys and values were partly dropped; each of their layers keeps different positions.
    `is_chunk_done`: the plan's chunk has passed all its layers, which took `pass_s` seconds over
    all its steps. `taken_s`: seconds of this step.
    """

    started_s: float
    draws: dict[Sequence, Draw] = field(default_factory=dict)
    chosen: dict[Sequence, Choice] = field(default_factory=dict)
    scored: dict[Sequence, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    evicted: list[Sequence] = field(default_factory=list)
    failures: dict[Sequence, Exception] = field(default_factory=dict)
    is_chunk_done: bool = False
    pass_s: float = 0.0
    taken_s: float = 0.0
