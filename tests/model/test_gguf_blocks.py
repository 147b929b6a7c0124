"""Quantised weights of GGUF files stay in the file's blocks on a CPU, wherever they are used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from gemserve.adapters.kinds import load_adapter
from gemserve.cli.main import main
from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.base_model import base_of, hash_norms, hash_weights
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import with_packed_linears
from gemserve.model.fused_parts import with_fused_parts
from gemserve.model.loading.loader import load, model_from_config, norms_from_config
from gemserve.model.loading.weight_memory import weights_of
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.blocks import BlockWeight, has_blocks
from tests import adapters
from tests.compiled_step import compiled_step, needs_compiler
from tests.model import gguf_files
from tests.model.test_gguf_families import FAMILIES, built, written
from tests.step_prompts import Prompts, needs_bfloat16

pytestmark = needs_compiler
KINDS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
HALF = pytest.param("bfloat16", marks=needs_bfloat16)


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def config(path: Path, **options: Any) -> ModelConfig:
    return ModelConfig(model=str(path), device="cpu", **{"dtype": "float32", **options})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.save("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf", kind=Kind.Q8_0)


def pair(path: Path, **options: Any) -> tuple[CausalModel, CausalModel]:
    """The model in blocks, and with ordinary weights."""
    kept = load(config(path, **options)).model
    dense = load(config(path, weights="dense", **options)).model
    assert has_blocks(kept.hf)
    assert not has_blocks(dense.hf)
    return kept, dense


@pytest.mark.parametrize("dtype", ["float32", HALF])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_numbers_are_those_of_ordinary_weights(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    """llama.cpp reorders the rows of Llama's queries and keys; hashes find calibrations."""
    path = written(tmp_path / "tiny.gguf", architecture, built(architecture), kind=Kind.Q8_0)
    kept, dense = pair(path, dtype=dtype)
    found = dict(kept.hf.named_parameters())
    assert found.keys() == dict(dense.hf.named_parameters()).keys()
    for name, weight in dense.hf.named_parameters():
        assert torch.equal(found[name] + 0, weight), name
        is_matrix = weight.dim() >= 2 and not name.endswith(
            ("mlp.gate.weight", "expert_gate.weight")
        )
        assert isinstance(found[name], BlockWeight) == is_matrix, name
    for rounded in (True, False):
        assert hash_weights(kept.hf, rounded=rounded) == hash_weights(dense.hf, rounded=rounded)
    assert hash_norms(kept.hf) == hash_norms(dense.hf)
    assert norms_from_config(config(path), model_from_config(config(path))[0]) == hash_norms(
        kept.hf
    )
    prompts = Prompts(kept, [1, 30])
    stepped = prompts.decode(with_cpu_step(kept, "auto"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(kept), atol=0.1 * largest, rtol=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_steps_and_layers_agree(kind: Kind, tmp_path: Path) -> None:
    path = gguf_files.save("llama", tmp_path / "tiny.gguf", kind=kind)
    check_steps(*pair(path), near=0.03, of_dense=0.05)


def check_steps(kept: CausalModel, dense: CausalModel, *, near: float, of_dense: float) -> None:
    """Steps over blocks agree with layers, and with ordinary weights; a row alone is the same."""
    prompts = Prompts(kept, [1, 30, 300])
    stepping = with_cpu_step(kept, "on")
    stepped = prompts.decode(stepping)
    largest = float(stepped.abs().max())
    # a number between two bytes may become either
    torch.testing.assert_close(stepped, prompts.decode(kept), atol=near * largest, rtol=0)
    exact = Prompts(dense, [1, 30, 300]).decode(dense)
    torch.testing.assert_close(stepped, exact, atol=of_dense * largest, rtol=0)
    for index in range(3):
        assert torch.equal(prompts.decode(stepping, [index])[0], stepped[index])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_steps_and_layers_agree_about_experts(kind: Kind, dtype: str, tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", "qwen3moe", built("qwen3moe"), kind=kind)
    kept, dense = pair(path, dtype=dtype)
    assert kept.hf.config._experts_implementation == "eager"
    assert dense.hf.config._experts_implementation != "eager"
    weight = kept.hf.model.layers[0].mlp.experts.down_proj
    assert isinstance(weight, BlockWeight)
    assert torch.equal(weight[2] + 0, (weight + 0)[2])
    assert torch.equal(weight[torch.tensor(3)] + 0, (weight + 0)[3])
    assert torch.equal(weight[1:3], (weight + 0)[1:3])
    with pytest.raises(IndexError, match="expert 4 of 4"):
        weight[4]
    check_steps(kept, dense, near=0.05, of_dense=0.1)


@needs_bfloat16
def test_what_is_made_for_speed_leaves_blocks_as_they_are(file: Path) -> None:
    model = load(config(file, dtype="bfloat16")).model
    faster = model.variant(with_fused_parts(with_packed_linears(model.hf)))
    assert all(
        isinstance(weight, BlockWeight) for weight in faster.hf.parameters() if weight.dim() == 2
    )
    prompts = Prompts(faster, [7, 40])
    stepped = prompts.decode(with_cpu_step(faster, "on"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(model), atol=0.05 * largest, rtol=0)


def test_tied_embeddings_share_their_blocks(tmp_path: Path) -> None:
    path = gguf_files.save(
        "llama", tmp_path / "tiny.gguf", kind=Kind.Q8_0, leave_out="output.weight"
    )
    hf = load(config(path)).model.hf
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    assert isinstance(hf.lm_head.weight, BlockWeight)


def test_adapters_decode_over_blocks(file: Path, tmp_path: Path) -> None:
    model = load(config(file)).model
    modules = {"target_modules": ["q_proj", "down_proj", "lm_head"]}
    adapters.write_lora(tmp_path / "lora", type(model.hf)(model.config), 0, **modules)
    adapter = load_adapter("lora", tmp_path / "lora", model, base_of(model), 1 << 30)
    prompts = Prompts(model, [5, 60], [adapter, adapter])
    stepping = with_cpu_step(model, "on")
    stepped = prompts.decode(stepping)
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.by_layers(), atol=0.02 * largest, rtol=0)


def test_memory_is_planned_as_it_is(file: Path) -> None:
    settings: Any = {"filter_layer": 1, "filter_precision": "model", "offload_layers": 0}
    model = load(config(file)).model
    empty, dtype, _ = model_from_config(config(file))
    planned = weights_of(empty, dtype, **settings)
    assert planned == weights_of(model.hf, model.dtype, **settings)
    assert (
        planned.device
        < 0.4
        * weights_of(model_from_config(config(file, weights="dense"))[0], dtype, **settings).device
    )
    assert planned.device < 1.15 * file.stat().st_size


def test_the_log_says_what_stays(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gemserve.loading"), "propagate", True)
    caplog.set_level(logging.INFO, logger="gemserve.loading")
    load(config(file))
    assert "30 in the file's blocks and the others dequantised to float32" in caplog.text


def test_a_damaged_block_is_found(file: Path, tmp_path: Path) -> None:
    from gemserve.model.loading.gguf_file import read_gguf

    damaged = tmp_path / "damaged.gguf"
    data = bytearray(file.read_bytes())
    tensor = next(t for t in read_gguf(file).tensors if t.name == "blk.1.ffn_up.weight")
    data[tensor.start : tensor.start + 2] = b"\x00\x7e"  # a scale that is no number
    damaged.write_bytes(data)
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight has numbers that are not finite"):
        load(config(damaged))


def test_other_words_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(file), "--weights", "sparse", "--tokens", "10"]) == 2
    assert "weights=sparse: must be one of auto, dense" in capsys.readouterr().err
