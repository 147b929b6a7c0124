"""`--quantise` makes blocks of ordinary weights when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gemserve.config import ModelConfig
from gemserve.errors import ConfigError
from gemserve.model.base_model import hash_of
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.loading.loader import BUILTIN_PATH, check_ranks, load, model_from_config
from gemserve.model.loading.quantise_linears import _int8, quantise
from gemserve.model.loading.weight_memory import weights_of
from gemserve_kernels import native_library
from gemserve_kernels.blocks import BlockWeight
from tests import models
from tests.architectures import families
from tests.compiled_step import NO_COMPILER, compiled_step, needs_compiler
from tests.model import gguf_files
from tests.step_prompts import Prompts

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def config(model: Any = "builtin", **options: Any) -> ModelConfig:
    return ModelConfig(model=str(model), device="cpu", **{"dtype": "float32", **options})


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_numbers_are_nearly_those_of_the_checkpoint(choice: Any) -> None:
    plain, made = load(config()).model, load(config(quantise=choice)).model
    found = dict(made.hf.named_parameters())
    for name, weight in plain.hf.named_parameters():
        assert isinstance(found[name], BlockWeight) == (weight.dim() == 2), name
        if weight.dim() < 2:
            continue
        few = weight.detach().unflatten(1, (-1, 32))
        off = ((found[name] + 0).unflatten(1, (-1, 32)) - few).abs()
        if choice == "int8" or "embed" in name or "lm_head" in name:
            assert (off <= few.abs().amax(-1, keepdim=True) / 254 * 1.05 + 1e-6).all(), name
        else:
            least, most = few.aminmax(dim=-1, keepdim=True)
            # up to an eighth of the range is cut off at either end
            assert (off <= (most - least) * (1 / 8 + 1 / 30) * 1.05 + 1e-6).all(), name
            assert off.norm() < 0.1 * few.norm(), name


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_steps_and_layers_agree(choice: Any) -> None:
    model = load(config(quantise=choice)).model
    prompts = Prompts(model, [1, 40])
    stepped = prompts.decode(with_cpu_step(model, "on"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(model), atol=0.03 * largest, rtol=0)


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_experts(choice: Any, tmp_path: Path) -> None:
    hf = families.build("qwen3_moe", vocab_size=models.VOCAB)
    hf.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(tmp_path)
    model = load(config(tmp_path, quantise=choice)).model
    plain = hf.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.1.mlp.experts.{name}"
        weight = model.hf.get_parameter(full)
        assert isinstance(weight, BlockWeight)
        assert (weight + 0 - plain[full]).norm() < 0.1 * plain[full].norm()
    settings: Any = {"filter_layer": 1, "filter_precision": "model", "offload_layers": 0}
    empty, dtype, _ = model_from_config(config(tmp_path, quantise=choice))
    assert weights_of(empty, dtype, **settings) == weights_of(model.hf, dtype, **settings)
    prompts = Prompts(model, [1, 40])
    stepped = prompts.decode(with_cpu_step(model, "on"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(model), atol=0.05 * largest, rtol=0)


def test_a_checkpoint_s_calibration_and_adapters_are_its_own() -> None:
    assert hash_of(load(config(quantise="int4")).model) == hash_of(load(config()).model)


def test_numbers_at_the_ends_of_float16() -> None:
    model = load(config()).model.hf
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[:] = 0
        weight[0, :32] = 1e-6
    few = _int8(weight)[:34]
    assert few[:2].view(torch.float16)[0] > 0
    with torch.no_grad():
        weight[0, 0] = 1e8
    with pytest.raises(ConfigError, match=r"numbers of 1e\+08, which are too large"):
        quantise(model, "int8")


def test_ordinary_checkpoints_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        pytest.fail("compiled")

    monkeypatch.setattr("gemserve.model.loading.loader.check_compiled", fail)
    load(config())
    model_from_config(config())


def test_memory_is_planned_as_it_is() -> None:
    settings: Any = {"filter_layer": 1, "filter_precision": "model", "offload_layers": 0}
    taken = {}
    for choice in ("off", "int8", "int4"):
        asked = config(quantise=choice)
        empty, dtype, _ = model_from_config(asked)
        taken[choice] = weights_of(empty, dtype, **settings)
        assert taken[choice] == weights_of(load(asked).model.hf, dtype, **settings)
    assert taken["int4"].device < taken["int8"].device < 0.3 * taken["off"].device


def test_what_cannot_be_quantised_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, name in (
        ({"weights": "dense"}, "not with weights=dense"),
        ({"dtype": "float16"}, "not with dtype=float16"),
    ):
        with pytest.raises(ConfigError, match=f"quantise=int8: {name}"):
            load(config(quantise="int8", **wrong))
    with pytest.raises(ConfigError, match="tensor_parallel=2: not with quantise=int8"):
        check_ranks(config(quantise="int8"), 2)
    file = gguf_files.save(
        "llama", tmp_path / "tiny.gguf", kind=gguf_files.GGMLQuantizationType.Q8_0
    )
    with pytest.raises(ConfigError, match="no matrices that can be quantised"):
        load(config(file, quantise="int8"))
    monkeypatch.setenv("CXX", NO_COMPILER)
    native_library.forget_libraries()
    with pytest.raises(ConfigError, match="quantise=int8: the compiler"):
        load(config(quantise="int8"))
