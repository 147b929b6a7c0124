"""The compiled decode step with any number of rows, heads, head sizes and kinds of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import with_packed_linears
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.compiled_step import compiled_step, needs_compiler
from tests.step_prompts import Prompts, half_model, needs_bfloat16

pytestmark = needs_compiler
MOST_ROWS = 65


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def build(**changes: Any) -> CausalModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**models.SIZES, "num_hidden_layers": 2, "vocab_size": 512, **changes}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return CausalModel(model)


def check(model: CausalModel, lengths: list[int]) -> None:
    prompts = Prompts(model, lengths, room=max(lengths) + 1)
    expected = prompts.decode(model)
    stepping = with_cpu_step(model, "on")
    actual = prompts.decode(stepping)
    torch.testing.assert_close(actual, expected, atol=5e-4, rtol=2e-4)
    for index in range(len(lengths)):
        assert torch.equal(prompts.decode(stepping, [index])[0], actual[index])


@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=needs_bfloat16)])
def test_every_number_of_rows(is_half: bool) -> None:
    """Rows are computed in passes, whose sizes differ. Each row's bits are those it has alone."""
    model = half_model() if is_half else build()
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [1 + 7 * index % 50 for index in range(MOST_ROWS)], room=60)
    alone = torch.cat([prompts.decode(stepping, [index]) for index in range(MOST_ROWS)])
    for count in range(1, MOST_ROWS + 1):
        assert torch.equal(prompts.decode(stepping, range(count)), alone[:count])
    if not is_half:
        torch.testing.assert_close(alone, prompts.decode(model), atol=5e-4, rtol=2e-4)


@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(head_dim: int) -> None:
    check(build(head_dim=head_dim), [1, 33, 520])


@pytest.mark.parametrize("group", range(1, 17))
def test_groups_of_query_heads(group: int) -> None:
    sizes = {"num_attention_heads": 2 * group, "hidden_size": 32 * group, "head_dim": 32}
    check(build(**sizes), [5, 520])


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"vocab_size": 523},  # fills no whole unit of a matrix
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ],
)
def test_other_weights(changes: dict[str, Any]) -> None:
    check(build(**changes), [1, 40, 130])


@needs_bfloat16
def test_bfloat16_that_fills_no_blocks() -> None:
    """oneDNN packs such weights otherwise, so the model's own are read if they are not packed."""
    torch.manual_seed(0)
    sizes = {**models.SIZES, "hidden_size": 80, "head_dim": 32}
    hf = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
    model = CausalModel(hf)
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [3, 40, 700])
    expected = prompts.decode(model)
    error = (prompts.decode(stepping) - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.03
    packed = model.variant(with_packed_linears(hf))
    assert with_cpu_step(packed, "auto") is packed


@pytest.mark.parametrize(
    "size", [{"hidden_size": 72}, {"head_dim": 24}, {"intermediate_size": 100}]
)
def test_sizes_that_fill_no_vectors_are_left_to_the_layers(size: dict[str, int]) -> None:
    """Vectors have at least 4 numbers, and 16 where tests run most."""
    model = build(**size)
    stepping = with_cpu_step(model, "auto")
    prompts = Prompts(model, [7], room=20)
    torch.testing.assert_close(
        prompts.decode(stepping), prompts.decode(model), atol=5e-4, rtol=2e-4
    )
