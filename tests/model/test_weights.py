"""Where weights are: what is planned, what the device has room for, what `plan` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from gemserve.cli.main import main
from gemserve.cost import WeightPlan, check_device_memory, plan_weights
from gemserve.errors import ConfigError
from gemserve.model.loading.weight_memory import weights_of
from tests import models

GIB = 2**30


def llama_8b() -> Any:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_figures_of_llama_8b() -> None:
    """Filter layer 13: 18 of 32 layers can rest on the host; FP8 copies are of 13 and a bit."""
    model = llama_8b()
    settings: dict[str, Any] = {"filter_layer": 13, "filter_precision": "model"}
    whole = weights_of(model, torch.bfloat16, offload_layers=0, **settings)
    assert (whole.fp8, whole.places, whole.host) == (0, 0, 0)
    assert whole.device / GIB == pytest.approx(14.96, abs=0.005)
    upper = weights_of(model, torch.bfloat16, offload_layers=18, **settings)
    assert upper.host + upper.resident == whole.device
    assert upper.host / GIB == pytest.approx(7.31, abs=0.005)
    assert upper.places / GIB == pytest.approx(2 * 7.31 / 18, abs=0.005)
    assert upper.device / GIB == pytest.approx(8.46, abs=0.005)
    settings["filter_precision"] = "fp8"
    fp8 = weights_of(model, torch.bfloat16, offload_layers=0, **settings)
    matrices = 13 * 218_103_808 + 4096 * (4096 + 2 * 1024)
    assert matrices <= fp8.fp8 <= matrices * 1.002
    assert fp8.device == whole.device + fp8.fp8


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    plan = weights_of(
        model, torch.float32, filter_layer=0, filter_precision="model", offload_layers=3
    )
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert plan.resident == 4 * (1000 * 64 + 64) + layer
    assert (plan.places, plan.host) == (2 * layer, 3 * layer)


def test_places_are_as_large_as_the_largest_upper_layer() -> None:
    plan = plan_weights([9, 1, 2, 3], rest_bytes=5, fp8_bytes=7, offload_layers=3, num_places=2)
    assert plan == WeightPlan(resident=14, fp8=7, places=6, host=6)
    assert plan.device == 27


def test_a_device_too_small_is_told_with_the_arithmetic() -> None:
    plan = WeightPlan(resident=60, fp8=20, places=10, host=500)
    check_device_memory(100, plan, 10)
    with pytest.raises(ConfigError, match="kv_memory=11: with 90 bytes of weights, 20 of them FP8"):
        check_device_memory(100, plan, 11)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    code = main(["plan", "--tokens", "4096", "--json", *flags])
    captured = capsys.readouterr()
    return code, (captured.out or captured.err).splitlines()


def test_plan_tells_where_weights_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ("--model", str(models.save("llama", tmp_path)), "--dtype", "bfloat16")
    code, lines = plan(capsys, *model, "--layer", "0")
    whole = json.loads(lines[-1])["weights"]
    assert code == 0
    assert (whole["fp8"], whole["places"], whole["host"]) == (0, 0, 0)
    assert any(line.startswith("weights on the device: 1.2 MiB") for line in lines)
    assert not any("on the host" in line for line in lines)
    flags = ("--layer", "0", "--offload-layers", "auto", "--filter-precision", "fp8")
    code, lines = plan(capsys, *model, *flags)
    apart = json.loads(lines[-1])["weights"]
    assert code == 0
    assert apart["resident"] + apart["host"] == whole["resident"]
    assert apart["host"] * 2 == apart["places"] * 3
    assert apart["fp8"] == 64 * (64 + 32 + 32) + 4 * (64 + 32 + 32)
    assert any("FP8 copies" in line for line in lines)
    assert any(line.startswith("weights on the host: ") for line in lines)
    code, lines = plan(capsys, *model, "--layer", "2", "--offload-layers", "3")
    assert code == 2
    assert lines == [
        "gemserve: offload_layers=3: must be 0: 1 of 4 layers are above filter layer 2, and two on "
        "the device are shared by those on the host"
    ]
