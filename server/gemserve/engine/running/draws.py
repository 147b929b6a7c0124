"""Draws the tokens of a step: of all its sequences together, or one by one if that fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.decoding.sampling import Draw, SamplerState, draw
from gemserve.engine.sequence.step_plan import DrawnToken, RunOutput

Logits = list[tuple[list[int], torch.Tensor]]  # numbers of sequences, [sequences, vocab] float32


def draw_tokens(logits: Logits, samplers: Sequence[SamplerState], out: RunOutput) -> None:
    """Draw a token for each row of logits. A sequence whose draw fails does not stop the others."""
    numbers = [number for some, _ in logits for number in some]
    drawn: list[Draw | Exception] | None = None
    try:
        matrices = [rows for _, rows in logits]
        rows = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        drawn = draw(rows, samplers)
    except Exception as error:
        if len(numbers) > 1:
            out.retried.append(("draw_batch", f"{type(error).__name__}: {error}"))
    if drawn is None:
        alone = [row for _, some in logits for row in some.split(1)]
        drawn = [_draw_alone(row, state) for row, state in zip(alone, samplers, strict=True)]
    for number, state, result in zip(numbers, samplers, drawn, strict=True):
        if isinstance(result, Exception):
            out.failures[number] = f"{type(result).__name__}: {result}"
        else:
            is_complete = state.matcher is not None and state.matcher.is_complete
            out.drawn[number] = DrawnToken(result.token, result.logprob, is_complete)


def _draw_alone(row: torch.Tensor, sampler: SamplerState) -> Draw | Exception:
    try:
        (result,) = draw(row, [sampler])
    except Exception as error:
        return error.with_traceback(None)
    return result
