"""The compiled decode step of every family that has it, against the family's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import with_packed_linears
from gemserve.model.cpu.step_weights import FAMILIES
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.compiled_step import compiled_step, needs_compiler
from tests.step_prompts import Prompts, needs_bfloat16

pytestmark = needs_compiler
LENGTHS = [1, 30, 99, 130, 700]
HALF_WINDOWED = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
# what makes a family special, beside small sizes
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 100, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 100,
        "layer_types": HALF_WINDOWED,
        "query_pre_attn_scalar": 24,
    },
    "granite": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 4.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
    },
    "gpt_oss": {
        **EXPERTS,
        "head_dim": 32,
        "num_local_experts": 5,
        "sliding_window": 100,
        "layer_types": HALF_WINDOWED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "ministral": {"head_dim": 32, "sliding_window": 100, "layer_types": HALF_WINDOWED},
    "mixtral": {**EXPERTS, "num_local_experts": 5},
    "olmo3": {"sliding_window": 100, "layer_types": HALF_WINDOWED},
    "olmoe": {**EXPERTS, "num_experts": 5},
    "phi3": {"sliding_window": 100, "partial_rotary_factor": 0.5},
    "qwen3_moe": {
        **EXPERTS,
        "head_dim": 32,
        "num_experts": 5,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
}


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalModel:
    """A random model whose attention is far from uniform, and whose norms and biases are not 1."""
    torch.manual_seed(0)
    settings = {**models.SIZES, **SETTINGS.get(family, {}), **changes}
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
    return CausalModel(model.to(dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_is_the_layers_of_every_family(family: str) -> None:
    model = build(family)
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, LENGTHS)
    expected, stored = prompts.decode(model), prompts.written(2)
    actual = prompts.decode(stepping)
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual / scale, expected / scale, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(prompts.written(2), stored, atol=1e-3, rtol=1e-3)
    for index in range(len(LENGTHS)):
        assert torch.equal(prompts.decode(stepping, [index])[0], actual[index])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_the_layers(family: str) -> None:
    model = build(family)
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [95])  # windows of 100 are crossed
    assert prompts.greedy(stepping, 0, 16) == prompts.greedy(model, 0, 16)


@needs_bfloat16
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_closer_to_float32_than_the_layers_are(family: str, is_packed: bool) -> None:
    """Packed matrices, and those that are not: experts are none of torch's linear layers."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 4}
    wide, model = build(family, **sizes), build(family, torch.bfloat16, **sizes)
    with torch.no_grad():
        for exact, rounded in zip(wide.hf.parameters(), model.hf.parameters(), strict=True):
            exact.copy_(rounded)
    if is_packed:
        model = model.variant(with_packed_linears(model.hf))
    stepping = with_cpu_step(model, "on")
    lengths = list(range(3, 27))
    exact = Prompts(wide, lengths).decode(wide)
    prompts = Prompts(model, lengths)
    # the median, because in some rows a router chooses another expert
    errors = [(prompts.decode(m) - exact).abs().mean(1).median() for m in (stepping, model)]
    assert errors[0] < errors[1]
