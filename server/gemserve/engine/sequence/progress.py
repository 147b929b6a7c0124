"""How far a request has come before its first token, and how long that will still take. No torch.

Tokens count within a phase: those that the filter pass has read, then those that the prefill pass
has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gemserve.cost import ModelShape
from gemserve.engine.sequence.sequence import LiveSequence, State

Phase = Literal["queue", "filter", "prefill"]
_PHASES: dict[State, Phase] = {
    State.WAITING: "queue",
    State.FILTERING: "filter",
    State.PREFILLING: "prefill",
}
# A chunk whose pass takes longer than expected is shown as far as this.
_MOST_OF_CHUNK = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`tokens` of `total` are read in this phase, `cached` of them by an earlier request.

    `eta_s`: estimated seconds until the first token. None: unknown, as it is in the queue.
    """

    phase: Phase
    tokens: int
    total: int
    cached: int = 0
    eta_s: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """What is further along has a higher rank."""
        return list(_PHASES.values()).index(self.phase), self.tokens / max(1, self.total)


def find_progress(
    sequence: LiveSequence,
    shape: ModelShape,
    *,
    running_s: float,
    seconds_per_flop: float | None,
) -> Progress | None:
    """The progress of a sequence. None: it has its first token, or has ended.

    `running_s`: seconds since its first step. `seconds_per_flop`: that of all passes so far, for as
    long as this sequence has no rate of its own.
    """
    phase = _PHASES.get(sequence.state)
    if phase is None:
        return None
    if phase == "queue":
        is_read = sequence.chosen is not None and sequence.filter_layer is not None
        return Progress(
            phase=phase, tokens=0, total=sequence.num_kept if is_read else sequence.num_prompt
        )
    share = 0.0
    if sequence.open_tokens and seconds_per_flop:
        expected_s = seconds_per_flop * _flops(
            sequence, shape, sequence.done, sequence.done + sequence.open_tokens
        )
        share = min(_MOST_OF_CHUNK, sequence.open_s / expected_s)
    tokens = sequence.done + int(share * sequence.open_tokens)
    done, left = _divide(sequence, shape, tokens)
    rate = running_s / done if done > 0 and running_s > 0 else seconds_per_flop
    return Progress(
        phase=phase,
        tokens=tokens,
        total=sequence.pass_length,
        cached=sequence.num_cached if phase == "filter" else sequence.num_reused,
        eta_s=None if rate is None else rate * left,
    )


def _divide(sequence: LiveSequence, shape: ModelShape, tokens: int) -> tuple[float, float]:
    """FLOPs done and left until the first token, if the current pass has read `tokens`."""
    is_filtering = sequence.state is State.FILTERING
    taken_over = sequence.num_cached if is_filtering else sequence.num_reused
    done = _flops(sequence, shape, taken_over, tokens)
    left = _flops(sequence, shape, tokens, sequence.pass_length)
    layer = sequence.filter_layer
    if layer is None or sequence.is_read_from_cache:
        return done, left
    if is_filtering:
        return done, left + shape.prefill_chunk(0, sequence.num_kept)
    cached, num_read = sequence.num_cached, sequence.num_read
    if sequence.segment_pass is not None:
        reading = sequence.segment_pass
        return done + reading.flops(shape, cached, reading.num_tokens), left
    return done + shape.filter_chunk(cached, num_read - cached, layer), left


def _flops(sequence: LiveSequence, shape: ModelShape, start: int, stop: int) -> float:
    """FLOPs of tokens start..stop−1 of the current pass."""
    if sequence.state is State.FILTERING:
        assert sequence.filter_layer is not None
        if sequence.segment_pass is not None:
            return sequence.segment_pass.flops(shape, start, stop)
        return shape.filter_chunk(start, stop - start, sequence.filter_layer)
    return shape.prefill_chunk(start, stop - start)
