"""Quantised checkpoints: dequantised by the definition of their format, or refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gemserve.config import ModelConfig
from gemserve.cost import filter_units
from gemserve.errors import ConfigError, ModelError
from gemserve.model.loading.loader import BUILTIN_PATH, check_ranks, load, model_from_config
from tests.architectures import families

Tensors = dict[str, torch.Tensor]
IDS = [5 + 7 * i % 150 for i in range(60)]
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
# the numbers of E2M1 by their bits
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def saved(family: str, folder: Path, **changes: Any) -> Path:
    families.build(family, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(folder)
    return folder


def rewrite(folder: Path, settings: Any, quantise: Callable[[str, torch.Tensor], Tensors]) -> None:
    """Replace the projections' tensors, and state how in the config."""
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, values in load_file(file).items():
        is_matrix = "_proj" in name and "bias" not in name
        tensors |= quantise(name, values) if is_matrix else {name: values}
    save_file(tensors, file, metadata={"format": "pt"})
    state(folder, settings)


def state(folder: Path, settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))


def block_of(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[r, c] → [r / rows, c / columns, rows, columns]"""
    return values.unfold(0, rows, rows).unfold(1, columns, columns)


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


class Fp8:
    """FP8 with a float32 scale for each square block, as DeepSeek and Qwen publish it."""

    def __init__(self, size: int = 16) -> None:
        self.settings = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [size, size],
            "fmt": "e4m3",
        }
        self.size = size
        self.dense: Tensors = {}

    def __call__(self, name: str, values: torch.Tensor) -> Tensors:
        scales = block_of(values, self.size, self.size).abs().amax((2, 3)) / E4M3_MAX
        codes = (values / spread(scales, self.size, self.size)).to(E4M3)
        self.dense[name] = codes.float() * spread(scales, self.size, self.size)
        return {name: codes, f"{name}_scale_inv": scales}


class Fp8Tensor:
    """FP8 with one scale for each matrix and one for its inputs, as Mistral publishes it."""

    def __init__(self) -> None:
        self.settings = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
        }
        self.dense: Tensors = {}

    def __call__(self, name: str, values: torch.Tensor) -> Tensors:
        scale = values.abs().max() / E4M3_MAX
        codes = (values / scale).to(E4M3)
        self.dense[name] = codes.float() * scale
        activation = name.replace(".weight", ".activation_scale")
        return {name: codes, f"{name}_scale_inv": scale, activation: torch.tensor(0.5)}


class Mxfp8:
    """FP8 with a power of two for each 32 numbers of a row; a byte has its exponent plus 127."""

    def __init__(self) -> None:
        self.settings = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
        }
        self.dense: Tensors = {}

    def __call__(self, name: str, values: torch.Tensor) -> Tensors:
        exponents = block_of(values, 1, 32).abs().amax((2, 3)).log2().floor() - 8
        scales = spread(exponents.exp2(), 1, 32)
        codes = (values / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        self.dense[name] = codes.float() * scales
        return {name: codes, f"{name}_scale_inv": (exponents + 127).to(torch.uint8)}


class Mxfp4:
    """GPT-OSS's experts: two numbers of E2M1 in a byte, and a power of two for each 32."""

    def __init__(self) -> None:
        self.settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
        self.dense: Tensors = {}

    def __call__(self, name: str, values: torch.Tensor) -> Tensors:
        if ".experts." not in name:
            return {name: values}
        rows = values.transpose(1, 2).unflatten(-1, (-1, 32))  # [experts, rows, scales, 32]
        exponents = rows.abs().amax(-1).log2().floor() - 2
        scaled = rows / exponents.exp2()[..., None]
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
        signs = scaled < 0
        numbers = FP4[codes] * torch.where(signs, -1.0, 1.0) * exponents.exp2()[..., None]
        self.dense[name] = numbers.flatten(-2).transpose(1, 2)
        bits = (codes + 8 * signs).to(torch.uint8).unflatten(-1, (16, 2))
        return {
            f"{name}_blocks": bits[..., 0] | bits[..., 1] << 4,
            f"{name}_scales": (exponents + 127).to(torch.uint8),
        }


def logits_of(model: Any) -> torch.Tensor:
    """Of gemserve's prefill, for the last token."""
    units = filter_units(model.num_layers)
    kv = model.new_memory(units * 64).kv(0, num_layers=model.num_layers, capacity=64)
    out = model.prefill_chunk(IDS, start=0, kv=kv, rope_tokens=64, is_last=True)
    assert out is not None
    return out[0]


def expected(family: str, dense: Tensors, **changes: Any) -> torch.Tensor:
    """Of transformers' own forward with the dequantised matrices, in float32."""
    hf = families.build(family, **changes)
    own = hf.state_dict()
    for name, values in dense.items():
        if name in own:
            own[name] = values
        else:  # transformers has the matrices of all experts in one tensor
            layer, _, rest = name.partition(".experts.")
            expert, _, kind = rest.partition(".")
            put_expert(own, f"{layer}.experts", int(expert), kind.split("_")[0], values)
    hf.load_state_dict(own)
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1]


def put_expert(own: Tensors, experts: str, expert: int, kind: str, values: torch.Tensor) -> None:
    if kind == "down":
        own[f"{experts}.down_proj"][expert] = values
        return
    both = own[f"{experts}.gate_up_proj"][expert]
    half = len(both) // 2
    both[half:] = values if kind == "up" else both[half:]
    both[:half] = values if kind == "gate" else both[:half]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", Fp8),
        ("qwen3", Fp8),
        ("qwen3_moe", Fp8),
        ("llama", Fp8Tensor),
        ("qwen3", Mxfp8),
        ("gpt_oss", Mxfp4),
    ],
)
def test_dequantised_as_the_format_says(
    family: str, kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's bytes are those that the log and the model have."""
    folder, form = saved(family, tmp_path), kind()
    rewrite(folder, form.settings, form)
    config = ModelConfig(model=str(folder), device="cpu", dtype="float32")
    with caplog.at_level(logging.INFO, "gemserve.loading"):
        loaded = load(config)
    assert len(form.dense) >= 8
    own = expected(family, form.dense)
    assert torch.allclose(logits_of(loaded.model), own, rtol=1e-4, atol=1e-4)
    weights = list(loaded.model.hf.parameters())
    assert {weight.dtype for weight in weights} == {torch.float32}
    planned, dtype, _ = model_from_config(config)
    num_bytes = sum(p.numel() for p in planned.parameters()) * dtype.itemsize
    assert num_bytes == sum(weight.nbytes for weight in weights)
    assert f"dequantised to float32: they take {num_bytes:,} bytes of memory" in caplog.text
    assert "not sharded" not in caplog.text


def test_what_is_not_quantised_has_the_asked_dtype_too(tmp_path: Path) -> None:
    """transformers leaves embeddings and norms of such checkpoints in the dtype of the file."""
    folder, form = saved("qwen3", tmp_path), Fp8()
    rewrite(folder, form.settings, form)
    loaded = load(ModelConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    name = "model.layers.1.self_attn.q_proj.weight"
    found = loaded.model.hf.state_dict()[name]
    assert torch.equal(found, form.dense[name].to(torch.bfloat16))
    assert {weight.dtype for weight in loaded.model.hf.parameters()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, form = saved("llama", tmp_path_factory.mktemp("fp8")), Fp8()
    rewrite(folder, form.settings, form)
    return folder


@pytest.fixture
def folder(fp8: Path, tmp_path: Path) -> Path:
    for file in fp8.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


QUERY = "model.layers.1.self_attn.q_proj.weight"
WRONG_SCALES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    # transformers would take the codes for the weights
    "none": (lambda t: t.pop(f"{QUERY}_scale_inv"), rf"no tensor {QUERY}_scale_inv with"),
    # transformers would take them for scales of larger blocks
    "too few": (
        lambda t: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"][:2].clone()}),
        r"shape \[64, 64\], and its scales \[2, 4\]: only whole blocks .* of \[16, 16\]",
    ),
    "too many": (
        lambda t: t.update({f"{QUERY}_scale_inv": torch.ones(5, 4)}),
        r"and its scales \[5, 4\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_SCALES)
def test_scales_that_do_not_fit(folder: Path, name: str) -> None:
    change, message = WRONG_SCALES[name]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(ModelConfig(model=str(folder), device="cpu"))


def test_experts_without_scales(tmp_path: Path) -> None:
    folder, form = saved("gpt_oss", tmp_path), Mxfp4()
    rewrite(folder, form.settings, form)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.0.mlp.experts.down_proj"
    scales = tensors.pop(f"{lost}_scales")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"scales of {lost}_blocks"):
        load(ModelConfig(model=str(folder), device="cpu"))
    tensors[f"{lost}_scales"] = scales[..., :2].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="must be one scale for each 32 numbers"):
        load(ModelConfig(model=str(folder), device="cpu"))


REFUSED: dict[str, tuple[Any, str]] = {
    "bitsandbytes": ({"load_in_4bit": True}, "bitsandbytes, .* the package bitsandbytes"),
    "torchao": ({"quant_type": "int4_weight_only"}, "torchao, .* the package torchao"),
    "hqq": ({}, "HQQ, .* the package hqq"),
    "modelopt": ({"quant_algo": "NVFP4"}, "in a way that cannot be read"),
    "7": ({"quant_method": 7}, "quant_method=7: "),
}


@pytest.mark.parametrize("method", REFUSED)
def test_other_methods_are_refused_before_weights_are_read(
    folder: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers skips methods that it does not know, and says which package it misses."""
    settings, message = REFUSED[method]
    state(folder, {"quant_method": method, **settings})
    (folder / "model.safetensors").unlink()
    config = ModelConfig(model=str(folder), device="cpu")
    for refuse in (load, model_from_config):
        with pytest.raises(ModelError, match=message) as caught:
            refuse(config)
        assert "\n" not in str(caught.value)
        assert "or its form in GGUF, FP8, MXFP8, MXFP4" in str(caught.value)
    assert capfd.readouterr().err == ""


def test_bitsandbytes_without_its_name(folder: Path) -> None:
    """As files of its first releases are."""
    state(folder, {"load_in_8bit": True})
    with pytest.raises(ModelError, match="quantised with bitsandbytes"):
        load(ModelConfig(model=str(folder), device="cpu"))


def test_accelerate_is_named_where_it_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package accelerate"):
        load(ModelConfig(model=str(folder), device="cpu"))


def test_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: not for quantised weights"):
        check_ranks(ModelConfig(model=str(folder), device="cpu"), 2)
