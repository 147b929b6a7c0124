"""What a checkpoint's folder brings along beside weights and settings is not run."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.loader import load, shape_from_config
from tests import models

CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "surprise"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def config(folder: Path) -> ModelConfig:
    return ModelConfig(model=str(folder), device="cpu", dtype="float32")


def change(path: Path, **fields: Any) -> None:
    stated = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**stated, **fields}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    models.save("llama", tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    (tmp_path / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(ModelError, match="safetensors"):
        load(config(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("model_type", ["llama", "surprise"])
def test_code_of_a_model_is_not_run(tmp_path: Path, model_type: str) -> None:
    """An architecture that transformers has is served by transformers' own code."""
    models.save("llama", tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    change(
        tmp_path / "config.json",
        model_type=model_type,
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    if model_type == "llama":
        assert type(load(config(tmp_path)).model.hf).__module__.startswith("transformers.")
    else:
        with pytest.raises(ModelError, match="trust_remote_code"):
            load(config(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_code_that_is_trusted_is_run_to_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are computed by a model without weights. To make one asked at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "code")
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = models.save("llama", tmp_path / "model")
    (folder / "code.py").write_text(CODE.replace("surprise", "trusted"))
    change(
        folder / "config.json",
        model_type="trusted",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    with pytest.raises(ModelError, match="trust_remote_code"):
        shape_from_config(config(folder))
    trusted = replace(config(folder), trust_remote_code=True)
    shape, _ = shape_from_config(trusted)
    assert shape == shape_from_config(config(models.save("llama", tmp_path / "plain")))[0]


def test_code_of_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    change(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="Surprise",
        auto_map={"AutoTokenizer": [None, "code.Tokenizer"]},
    )
    with pytest.raises(ModelError, match="trust_remote_code"):
        load(config(tmp_path))
    assert not (tmp_path / "ran").exists()
