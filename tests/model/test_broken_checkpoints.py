"""Checkpoints that are broken: each is refused at the start, with one line that says why.

transformers fills in random numbers for what a checkpoint lacks, and only warns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.loader import load
from tests import models

Tensors = dict[str, torch.Tensor]
QUERY = "model.layers.2.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def cut_into_shards(folder: Path) -> None:
    """Two files and an index in place of one file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in some}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_off(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])


def refusal(folder: Path, dtype: str = "float32") -> str:
    """The message of the refusal, in one line."""
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(model=str(folder), device="cpu", dtype=dtype))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


def renamed(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".mlp." in n]:
        tensors[name.replace(".mlp.", ".ffn.")] = tensors.pop(name)


def one_number(tensors: Tensors, name: str, value: float) -> None:
    tensors[name].view(-1)[5] = value


OF_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing projection": (lambda t: t.pop(QUERY), rf"no weights for {QUERY}"),
    "a missing norm": (lambda t: t.pop("model.norm.weight"), r"no weights for model\.norm\.weight"),
    "a missing head": (lambda t: t.pop("lm_head.weight"), r"no weights for lm_head\.weight"),
    "no embedding": (
        lambda t: t.pop("model.embed_tokens.weight"),
        r"no weights for model\.embed_tokens\.weight",
    ),
    "a surplus bias": (
        lambda t: t.update({QUERY.replace("weight", "bias"): torch.ones(64)}),
        r"no place for: model\.layers\.2\.self_attn\.q_proj\.bias",
    ),
    "renamed tensors": (renamed, r"no weights for model\.layers\.0\.mlp.* \(12 in all\)"),
    "a wrong shape": (
        lambda t: t.update({QUERY: t[QUERY][:32].clone()}),
        r"q_proj\.weight has shape \[32, 64\], and by config\.json \[64, 64\]",
    ),
    "integers": (
        lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}),
        r"q_proj\.weight' has the dtype 'I8', and config\.json has no quantization_config",
    ),
    "one NaN": (lambda t: one_number(t, QUERY, float("nan")), rf"{QUERY} has numbers that are not"),
    "one infinity": (
        lambda t: one_number(t, "lm_head.weight", float("inf")),
        r"lm_head\.weight has numbers that are not finite",
    ),
    "NaN in an embedding that no check reads": (
        lambda t: t["model.embed_tokens.weight"][-1].fill_(float("nan")),
        r"embed_tokens\.weight has numbers that are not finite",
    ),
    "nothing in it": (lambda t: t.clear(), r"no weights for .*\(\d+ in all\)"),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_broken_tensors(folder: Path, name: str) -> None:
    change, message = OF_TENSORS[name]
    change_tensors(folder, change)
    assert_matches(message, refusal(folder))


def assert_matches(pattern: str, message: str) -> None:
    with pytest.raises(ModelError, match=pattern):
        raise ModelError(message)


OF_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "more layers than the weights": ({"num_hidden_layers": 6}, r"no weights for model\.layers\.4"),
    "fewer layers than the weights": (
        {"num_hidden_layers": 3},
        r"no place for: model\.layers\.3.*num_hidden_layers is 3",
    ),
    "other key heads": ({"num_key_value_heads": 4}, r"shape \[32, 64\], and by config\.json"),
    "another vocabulary": ({"vocab_size": 999}, r"shape .*, and by config\.json \[999, 64\]"),
    "another inner size": ({"intermediate_size": 128}, r"shape .*, and by config\.json"),
    "biases that are not there": ({"attention_bias": True}, r"no weights for .*bias"),
    "no layers": ({"num_hidden_layers": 0}, r"num_hidden_layers=0"),
    "an unknown activation": ({"hidden_act": "snake"}, r"KeyError: 'snake'|snake"),
    "an unknown type": ({"model_type": "surprise"}, "surprise"),
    "an unknown rope": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        "spiral",
    ),
}


@pytest.mark.parametrize("name", OF_CONFIG)
def test_a_config_that_contradicts_the_weights(folder: Path, name: str) -> None:
    fields, message = OF_CONFIG[name]
    change_config(folder, **fields)
    assert_matches(message, refusal(folder))


def test_a_file_that_is_cut_off(folder: Path) -> None:
    """The download was interrupted."""
    cut_off(folder / "model.safetensors", 0.5)
    assert_matches(r"model\.safetensors: has \d+ bytes, and by its header \d+", refusal(folder))


def test_a_file_that_is_cut_off_within_its_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    assert_matches("is cut off after 500 bytes, within its header", refusal(folder))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"version https://git-lfs"])
def test_a_file_of_something_else(folder: Path, content: bytes) -> None:
    """Git leaves a small text in place of a large file that it has not fetched."""
    (folder / "model.safetensors").write_bytes(content)
    assert_matches(r"model\.safetensors: is no safetensors file", refusal(folder))


def test_half_a_shard(folder: Path) -> None:
    cut_into_shards(folder)
    cut_off(folder / "model-00002-of-00002.safetensors", 0.6)
    assert_matches(r"model-00002-of-00002\.safetensors: has \d+ bytes", refusal(folder))


def test_a_shard_that_is_not_there(folder: Path) -> None:
    cut_into_shards(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert_matches(r"model-00001-of-00002\.safetensors: no such file", refusal(folder))


def test_an_index_that_names_what_a_shard_does_not_have(folder: Path) -> None:
    cut_into_shards(folder)
    index = folder / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    stated["weight_map"][QUERY] = "model-00001-of-00002.safetensors"
    stated["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(stated))
    assert_matches(r"has no tensor .*, and model\.safetensors\.index\.json says", refusal(folder))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_cannot_be_read(folder: Path, content: str) -> None:
    cut_into_shards(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    assert_matches(r"model\.safetensors\.index\.json: cannot be read", refusal(folder))


def test_whole_shards_load(folder: Path) -> None:
    cut_into_shards(folder)
    load(ModelConfig(model=str(folder), device="cpu"))


def test_what_changes_no_logits_is_named_and_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Classifiers' heads, and buffers that older releases of transformers stored."""
    more = {
        "score.weight": torch.ones(2, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    change_tensors(folder, lambda tensors: tensors.update(more))
    with caplog.at_level(logging.WARNING, "gemserve.loading"):
        load(ModelConfig(model=str(folder), device="cpu"))
    assert "not used: score.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_a_tied_head_is_not_missing(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    loaded = load(ModelConfig(model=str(folder), device="cpu"))
    assert loaded.model.hf.lm_head.weight is loaded.model.hf.model.embed_tokens.weight
