"""An answer does not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch
from tests.architectures import families
from tests.architectures.page import PAGE, lines_of
from tests.compiled_step import compiled_step, needs_compiler

LENGTHS = (37, 5, 101, 64, 250, 72, 73, 301)  # on both sides of windows and of the original context
STEPS = 6
LINEAR = functional.linear
DYNAMIC = {
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}


def _longrope(size: int) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(size)],
        "long_factor": [1.5 + 0.8 * i for i in range(size)],
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return {"rope_parameters": rope}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "minicpm3": ("minicpm3", {}),
    "youtu": ("youtu", {}),
    "gemma3n_text": ("gemma3n_text", {}),
    "gemma4_text": ("gemma4_text", {}),
    "gpt2": ("gpt2", {}),
    "phimoe": ("phimoe", {}),
    "minicpm3 longrope": ("minicpm3", _longrope(4)),
    "deepseek_v3 dynamic": ("deepseek_v3", DYNAMIC),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 128, **_longrope(8)}),
    "llama longrope": ("llama", _longrope(8)),
    "llama dynamic": ("llama", DYNAMIC),
    "qwen2 dynamic": ("qwen2", DYNAMIC),
}


class Conversations:
    """Sequences that a model has read, and whose next tokens it writes as often as is wanted."""

    def __init__(self, model: CausalModel, prompts: Sequence[Sequence[int]]) -> None:
        self._model, self._prompts = model, prompts
        room = max(map(len, prompts)) + STEPS
        units = 2 * model.num_layers * room
        self._memory = model.new_memory(units * len(prompts))
        self._spans = [
            self._memory.kv(index * units, num_layers=model.num_layers, capacity=room)
            for index in range(len(prompts))
        ]
        self._first = []
        for ids, kv in zip(prompts, self._spans, strict=True):
            length, half = len(ids) + STEPS, len(ids) // 2
            model.prefill_chunk(ids[:half], start=0, kv=kv, rope_tokens=length, is_last=False)
            out = model.prefill_chunk(
                ids[half:], start=half, kv=kv, rope_tokens=length, is_last=True
            )
            assert out is not None
            self._first.append(int(out.argmax()))

    def write(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of sequences `rows`, [rows, steps], and [rows, steps, vocab] logits.

        All are one batch. A sequence may be in it several times.
        """
        newest = [self._first[row] for row in rows]
        lengths = [len(self._prompts[row]) for row in rows]
        logits = []
        for step in range(STEPS):
            slots = [length + step for length in lengths]
            spans = [self._spans[row] for row in rows]
            batch = DecodeBatch(self._memory, spans, slots=slots, positions=slots)
            rope_tokens = [length + STEPS for length in lengths]
            logits.append(self._model.decode(newest, batch, rope_tokens))
            newest = logits[-1].argmax(-1).tolist()
        together = torch.stack(logits, 1)
        return together.argmax(-1), together


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, families.VOCAB, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


def _row_by_row(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A product, each row of which is computed alone.

    Libraries sum up in another order for another number of rows, and how many rows an expert has
    depends on the neighbours' tokens.
    """
    rows = states.reshape(-1, 1, states.shape[-1]).unbind()
    outs = [LINEAR(row, weight, bias) for row in rows]
    return torch.cat(outs).view(*states.shape[:-1], -1)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_in_a_batch_of_eight_is_the_answer_alone(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit beside seven others as beside itself seven times, where all sums are of one size.

    In a batch of one, the libraries' order of summation is another, and the tokens are the same.
    """
    family, changes = CASES[case]
    model = CausalModel(families.build(family, **changes))
    model.config._experts_implementation = "eager"  # one product for each expert
    conversations = Conversations(model, _prompts())
    every = range(len(LENGTHS))
    alone = [conversations.write([row]) for row in every]
    monkeypatch.setattr(functional, "linear", _row_by_row)
    tokens, logits = conversations.write(every)
    for row, (tokens_alone, logits_alone) in enumerate(alone):
        _, among_itself = conversations.write([row] * len(LENGTHS))
        assert torch.equal(logits[row], among_itself[row]), (row, case)
        assert torch.equal(tokens[row], tokens_alone[0])
        assert float((logits[row] - logits_alone[0]).abs().max()) < 1e-4


def _stepping() -> list[str]:
    """The types whose decode steps can be compiled, by the page."""
    lines = lines_of(PAGE.read_text(), "served")
    return [line.split("`")[1] for line in lines if line.endswith("| yes |")]


@needs_compiler
@pytest.mark.parametrize("family", _stepping())
def test_a_compiled_step_beside_seven_others_is_the_step_alone(family: str) -> None:
    """Bit for bit in float32, through windows, biases and norms: its sums have one order."""
    with compiled_step():
        model = with_cpu_step(CausalModel(families.build(family)), "on")
        conversations = Conversations(model, _prompts())
        every = range(len(LENGTHS))
        tokens, logits = conversations.write(every)
        for row in every:
            tokens_alone, logits_alone = conversations.write([row])
            assert torch.equal(logits[row], logits_alone[0]), row
            assert torch.equal(tokens[row], tokens_alone[0])
        _, of_three = conversations.write([2, 7, 4])
        assert torch.equal(of_three, logits[[2, 7, 4]])
