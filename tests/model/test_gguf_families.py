"""Each family of GGUF files gives the model that its ordinary checkpoint gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from gemserve.config import ModelConfig
from gemserve.cost import filter_units
from gemserve.model.loading.gguf_families import FAMILIES
from gemserve.model.loading.loader import load
from tests import models
from tests.architectures import families
from tests.architectures.page import PAGE
from tests.model import gguf_files

IDS = [5 + 7 * i % 150 for i in range(120)]
PARTLY = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
# settings that differ from the defaults of transformers' configs, so that a missed one shows
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "llama": {},
    "phi3": {"rope_parameters": PARTLY},
    "qwen2": {"use_sliding_window": False},
    "qwen2moe": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3moe": {"use_sliding_window": False, "norm_topk_prob": True},
    "starcoder2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 999999.0},
        "sliding_window": None,
        "norm_epsilon": 1e-3,
    },
}


def built(architecture: str, **changes: Any) -> Any:
    family = FAMILIES[architecture].model_type
    return families.build(
        family, **{"vocab_size": models.VOCAB, **CHANGES[architecture], **changes}
    )


def written(path: Path, architecture: str, hf: Any, **options: Any) -> Path:
    if architecture == "gemma3":
        options["change"] = lambda writer: writer.add_sliding_window(families.WINDOW)
    return gguf_files.write(path, hf, architecture=architecture, **options)


def logits_of(model: Any) -> torch.Tensor:
    units = filter_units(model.num_layers)
    kv = model.new_memory(units * 128).kv(0, num_layers=model.num_layers, capacity=128)
    out = model.prefill_chunk(IDS, start=0, kv=kv, rope_tokens=128, is_last=True, is_scored=True)
    assert out is not None
    return out


def compare(path: Path, architecture: str, theirs: Any, **options: Any) -> None:
    file = written(path, architecture, theirs, **options)
    loaded = load(ModelConfig(model=str(file), device="cpu", dtype="float32"))
    ours = loaded.model.hf
    assert type(ours) is type(theirs)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-6, rtol=1e-6)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(loaded.model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_ordinary_checkpoint(architecture: str, tmp_path: Path) -> None:
    """transformers' own reader leaves out settings of most of these families."""
    compare(tmp_path / "tiny.gguf", architecture, built(architecture))


@pytest.mark.parametrize("name", ["rope.scale_linear", "rope.scaling.factor"])
@pytest.mark.parametrize("factor", [0.0, 1.0, 4.0])
def test_a_scaling_without_a_type_is_linear(name: str, factor: float, tmp_path: Path) -> None:
    """It was left out without a word. 0 and 1 are no scaling."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor or 1.0}
    theirs = built("llama", rope_parameters=rope)
    compare(
        tmp_path / "tiny.gguf",
        "llama",
        theirs,
        change=lambda writer: writer.add_float32(f"llama.{name}", factor),
    )


def test_a_sliding_window_of_0_is_none(tmp_path: Path) -> None:
    """Phi-4's files have it. It was a window in which no token saw another."""
    theirs = built("phi3", sliding_window=0)
    path = gguf_files.write(tmp_path / "tiny.gguf", theirs, architecture="phi3")
    assert load(ModelConfig(model=str(path), device="cpu")).model.hf.config.sliding_window is None


def test_every_family_is_compared_and_listed() -> None:
    assert set(CHANGES) == set(FAMILIES)
    listed = PAGE.read_text().split("<!-- begin: gguf -->")[1].split("<!-- end: gguf -->")[0]
    assert re.findall(r"`(\w+)`", listed) == list(FAMILIES)


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_otherwise(
    architecture: str, num_layers: int, tmp_path: Path
) -> None:
    """No setting says so; llama.cpp tells it by the number of layers."""
    sizes = {"hidden_size": 96, "layer_types": None, "num_hidden_layers": num_layers}
    theirs = built(architecture, **sizes, query_pre_attn_scalar=24)
    compare(tmp_path / "tiny.gguf", architecture, theirs)


def test_experts_in_quantised_blocks(tmp_path: Path) -> None:
    theirs = built("qwen3moe")
    file = written(tmp_path / "tiny.gguf", "qwen3moe", theirs, kind=GGMLQuantizationType.Q8_0)
    ours = load(ModelConfig(model=str(file), device="cpu", dtype="bfloat16")).model.hf
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    exact = theirs.state_dict()[name]
    assert (ours.state_dict()[name] - exact).abs().max() < 0.02 * exact.abs().max()
