"""Loading: what is missing, broken or unsupported is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BloomConfig, BloomForCausalLM

from gemserve.calibration.files import Calibration
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.errors import ConfigError, ModelError
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.loading.loader import LoadedModel, load
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import text_prompt
from tests import models


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_checkpoints_load_and_pass_the_check(name: str, tmp_path: Path) -> None:
    loaded = load(ModelConfig(model=str(models.save(name, tmp_path)), device="cpu"))
    assert loaded.model.num_layers == 4
    assert loaded.eos_ids == {2}
    assert loaded.model.dtype == torch.float32


def test_bfloat16_loads(tmp_path: Path) -> None:
    directory = models.save("llama", tmp_path)
    loaded = load(ModelConfig(model=str(directory), device="cpu", dtype="bfloat16"))
    assert loaded.model.shape.element_bytes == 2


def test_a_checkpoint_s_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    directory = models.save("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    loaded = load(ModelConfig(model=str(directory), device="cpu"))
    assert len(text_prompt(loaded.tokenizer, "river " * 50).ids) > 50
    assert len(text_prompt(loaded.tokenizer, "river").ids) < 16


def test_the_backend_is_the_one_asked_for(tmp_path: Path) -> None:
    directory = str(models.save("llama", tmp_path))
    config = ModelConfig(model=directory, device="cpu", attention_backend="reference")
    assert load(config).model.backend.name == "reference"


def test_a_backend_that_cannot_be_used_is_refused_before_anything_is_loaded() -> None:
    config = ModelConfig(model="nobody/nothing", device="cpu", attention_backend="cudnn")
    with pytest.raises(ConfigError, match="attention_backend=cudnn: runs on cuda only, not on cpu"):
        load(config)


@pytest.mark.parametrize("broken", ["write", "decode"])
def test_a_backend_that_decodes_wrongly_is_refused(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads prompts and what decodes are different kernels."""
    model = CausalModel(models.build("llama"))
    right = getattr(model.backend, broken)

    def wrong(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return right(first, *rest, **{**options, "layer": 1})

    monkeypatch.setattr(model.backend, broken, wrong)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: its logits"):
        check_servable(model)


def test_missing_directory() -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load(ModelConfig(model="/nowhere/at/all"))


def test_unknown_hub_id_offline() -> None:
    with pytest.raises(ModelError, match="cannot load model 'nobody/nothing'"):
        load(ModelConfig(model="nobody/nothing"))


def test_corrupt_weights(tmp_path: Path) -> None:
    weights = models.save("llama", tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cut off after 1000 bytes"):
        load(ModelConfig(model=str(tmp_path)))


def test_missing_weights(tmp_path: Path) -> None:
    (models.save("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load model"):
        load(ModelConfig(model=str(tmp_path)))


def test_unreadable_config(tmp_path: Path) -> None:
    (models.save("llama", tmp_path) / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load model"):
        load(ModelConfig(model=str(tmp_path)))


def test_architecture_without_the_seam_is_refused() -> None:
    """BLOOM's ALiBi never reaches the attention function: it would be served wrong."""
    config = BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4)
    config.max_position_embeddings = 512
    with pytest.raises(ModelError, match="Bloom"):
        check_servable(CausalModel(BloomForCausalLM(config)))


def test_windowed_filter_layer_is_refused_at_load() -> None:
    loaded = LoadedModel(
        model=CausalModel(models.build("mistral-window")),
        tokenizer=None,
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    with pytest.raises(ConfigError, match=r"filter_layer=2: .* last 100 tokens"):
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20))
    assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20, filter_method="none"))
    assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20, max_prompt_tokens=100))


def test_calibrated_heads_that_see_a_window_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration written by hand may name lower layers, whose windows nobody checked."""
    loaded = LoadedModel(
        model=CausalModel(models.build("llama")),
        tokenizer=None,
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    monkeypatch.setattr(CausalModel, "window_of", lambda self, layer: 100 if layer == 0 else None)
    found = Calibration(layer=2, heads=((0, 1), (2, 0)), is_measured=True)
    config = EngineConfig(kv_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"head 0\.1: its layer sees only the last 100 tokens"):
        assemble(loaded, config, found)
    assemble(loaded, config, replace(found, heads=((2, 0),)))


def test_filter_layer_comes_from_the_models_calibration(tmp_path: Path) -> None:
    loaded = LoadedModel(
        model=CausalModel(models.build("llama")),
        tokenizer=None,
        eos_ids=frozenset(),
        source=str(tmp_path),
        name="tiny",
    )
    assert (
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20)).config.filter_layer == 2
    )  # round(0.4 · 4)
    (tmp_path / "calibration.json").write_text(json.dumps({"filter_layer": 1}))
    assert assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20)).config.filter_layer == 1
    assert (
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20, filter_layer=3)).config.filter_layer
        == 3
    )
    with pytest.raises(ConfigError, match="filter_layer=4"):
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20, filter_layer=4))
    (tmp_path / "calibration.json").write_text('{"filter_layer": "two"}')
    with pytest.raises(ConfigError, match="filter_layer='two'"):
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20))
