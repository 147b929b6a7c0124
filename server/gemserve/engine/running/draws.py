"""Draws the tokens of a step: of all its sequences together, or one by one if that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gemserve.decoding.sampling import Draw, SamplerState, draw
from gemserve.engine.sequence.step_plan import DrawnToken, RunOutput

# the sequence of each row, by its number, and [rows, vocab] float32
Logits = list[tuple[list[int], torch.Tensor]]


def draw_tokens(
    logits: Logits,
    samplers: Mapping[int, SamplerState],
    proposed: Mapping[int, Sequence[int]],
    out: RunOutput,
) -> None:
    """Draw the tokens of a step. A sequence whose draw fails does not stop the others.

    A sequence's first row is that of its newest token, and each other one that of a `proposed`
    token. A row is drawn from only if the row before it has drawn what was proposed.
    """
    numbers = [number for some, _ in logits for number in some]
    first_of: dict[int, int] = {}
    for row, number in enumerate(numbers):
        first_of.setdefault(number, row)
    drawing, offset = list(first_of), 0
    while drawing:
        rows = _rows_of(logits, [first_of[number] + offset for number in drawing])
        results = _draw_together(rows, [samplers[number] for number in drawing], out)
        going = []
        for number, result in zip(drawing, results, strict=True):
            if isinstance(result, Exception):
                if not offset:  # else it comes again when the next step begins with this row
                    out.failures[number] = f"{type(result).__name__}: {result}"
                continue
            matcher = samplers[number].matcher
            is_complete = matcher is not None and matcher.is_complete
            token = DrawnToken(result.token, result.logprob, is_complete)
            out.drawn.setdefault(number, []).append(token)
            tried = proposed.get(number, ())
            if not is_complete and list(tried[offset : offset + 1]) == [result.token]:
                going.append(number)
        drawing, offset = going, offset + 1


def _rows_of(logits: Logits, wanted: list[int]) -> list[torch.Tensor]:
    """Matrices of logits, whose rows are those `wanted`."""
    matrices = [matrix for _, matrix in logits]
    if len(wanted) == sum(len(matrix) for matrix in matrices):
        return matrices
    whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    return [whole[wanted]]


def _draw_together(
    matrices: list[torch.Tensor], samplers: Sequence[SamplerState], out: RunOutput
) -> list[Draw | Exception]:
    """A draw of each row: of all rows at once, or one by one if that fails."""
    try:
        return draw(matrices[0] if len(matrices) == 1 else torch.cat(matrices), samplers)
    except Exception as error:
        if len(samplers) > 1:
            out.retried.append(("draw_batch", f"{type(error).__name__}: {error}"))
    alone = [row for matrix in matrices for row in matrix.split(1)]
    return [_draw_alone(row, state) for row, state in zip(alone, samplers, strict=True)]


def _draw_alone(row: torch.Tensor, sampler: SamplerState) -> Draw | Exception:
    try:
        (result,) = draw(row, [sampler])
    except Exception as error:
        return error.with_traceback(None)
    return result
