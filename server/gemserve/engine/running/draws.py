"""Draws the tokens of a step: of all its sequences together, or one by one if that fails."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch

from gemserve.decoding.sampling import Draw, SamplerState, draw
from gemserve.engine.running.results import RunOutput
from gemserve.engine.sequence.sequence import Sequence

Logits = list[tuple[list[Sequence], torch.Tensor]]  # [sequences, vocab] of each, float32


def draw_tokens(logits: Logits, samplers: Mapping[Sequence, SamplerState], out: RunOutput) -> None:
    """Draw a token for each row of logits. A sequence whose draw fails does not stop the others."""
    sequences = [sequence for some, _ in logits for sequence in some]
    drawn: list[Draw | Exception] | None = None
    with suppress(Exception):
        matrices = [rows for _, rows in logits]
        rows = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        drawn = draw(rows, [samplers[sequence] for sequence in sequences])
    if drawn is None:
        alone = [row for _, some in logits for row in some.split(1)]
        drawn = [
            _draw_alone(row, samplers[sequence])
            for row, sequence in zip(alone, sequences, strict=True)
        ]
    for sequence, result in zip(sequences, drawn, strict=True):
        if isinstance(result, Exception):
            out.failures[sequence] = result
        else:
            out.draws[sequence] = result


def _draw_alone(row: torch.Tensor, sampler: SamplerState) -> Draw | Exception:
    try:
        (result,) = draw(row, [sampler])
    except Exception as error:
        return error.with_traceback(None)
    return result
