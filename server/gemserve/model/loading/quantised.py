"""Checkpoints whose weights are quantised: which are read, and what is wrong with their scales.

Those that transformers can turn into ordinary weights without further packages are dequantised
when they are loaded. On a CPU gemserve itself reads some that are packed (`packed_checkpoints`).
All others are refused by their method's name.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch

from gemserve.errors import ModelError, shown
from gemserve.model.loading.packed_formats import METHODS, Packing, read_packing
from gemserve.model.loading.weight_files import StoredTensor

log = logging.getLogger("gemserve.loading")

# by `quant_method` of config.json
_READ = {"fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}
# what transformers 5.23 needs for the others; none of it is used here
_NEEDS = {
    "aqlm": ("AQLM", "the package aqlm"),
    "auto-round": ("AutoRound", "the package auto-round"),
    "awq": ("AWQ", "the package gptqmodel"),
    "bitnet": ("BitNet", "linear layers that quantise what they are given, too"),
    "bitsandbytes": ("bitsandbytes", "the package bitsandbytes"),
    "compressed-tensors": ("compressed-tensors", "the package compressed-tensors"),
    "eetq": ("EETQ", "the package kernels and an NVIDIA GPU"),
    "fbgemm_fp8": ("FBGEMM's FP8", "the package fbgemm-gpu and an NVIDIA GPU"),
    "fp_quant": ("FP-Quant", "the package fp_quant and an NVIDIA GPU"),
    "gptq": ("GPTQ", "the packages optimum and gptqmodel"),
    "higgs": ("HIGGS", "the package flute-kernel and an NVIDIA GPU"),
    "hqq": ("HQQ", "the package hqq"),
    "quanto": ("quanto", "the package optimum-quanto"),
    "quark": ("Quark", "the package amd-quark"),
    "spqr": ("SpQR", "the package spqr_quant and an NVIDIA GPU"),
    "torchao": ("torchao", "the package torchao"),
    "vptq": ("VPTQ", "the package vptq and an NVIDIA GPU"),
}
_ADVICE = f"serve the original model, or its form in GGUF, {', '.join(_READ.values())}"
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_MXFP4_BLOCK = 32  # numbers of one scale


def quantisation_of(config: Any) -> dict[str, Any] | None:
    """The checkpoint's `quantization_config`, or None if its weights are not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found if isinstance(found, Mapping) else found.to_dict())


def find_packing(source: str, config: Any) -> Packing | None:
    """How the checkpoint's matrices are packed, or None if gemserve does not unpack such ones.

    Raises `ModelError` with the setting of a known method that is not read.
    """
    settings = quantisation_of(config)
    if settings is None or _method(settings) not in METHODS:
        return None
    try:
        return read_packing(settings)
    except ValueError as error:
        raise ModelError(f"{source}: quantization_config.{error}; {_ADVICE}") from error


def check_quantisation(source: str, config: Any, device: torch.device) -> None:
    """Raise `ModelError` if the weights are quantised in a way that is not read."""
    settings = quantisation_of(config)
    if settings is None:
        return
    if device.type == "cpu" and find_packing(source, config) is not None:
        return
    method = _method(settings)
    stated = f"{source}: quantization_config.quant_method={shown(method)}"
    if method in _READ:
        if method != "mxfp4" and importlib.util.find_spec("accelerate") is None:
            raise ModelError(
                f"{stated}: transformers needs the package accelerate to dequantise "
                f"{_READ[method]}: pip install 'accelerate>=1.15,<2'"
            )
        return
    if method not in _NEEDS:
        raise ModelError(
            f"{stated}: its weights are quantised in a way that cannot be read; {_ADVICE}"
        )
    name, needs = _NEEDS[method]
    where = f" on {device.type}, only on a CPU (device=cpu)" if method in METHODS else ""
    raise ModelError(
        f"{stated}: its weights are quantised with {name}, for which transformers needs {needs}, "
        f"and which gemserve does not serve{where}; {_ADVICE}"
    )


def _method(settings: Mapping[str, Any]) -> Any:
    """The method's name. Old files of bitsandbytes do not state it."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return settings.get("quant_method")


def ask_for_dequantised(config: Any) -> None:
    """Change `config` such that transformers loads quantised weights as ordinary ones.

    Without it, transformers keeps or dequantises them depending on the GPU and on packages.
    """
    settings = quantisation_of(config)
    if settings is not None:
        config.quantization_config = {**settings, "dequantize": True}


def check_scales(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `ModelError` if quantised weights lack scales, or have too many or too few.

    transformers takes a weight without scales as it is. It derives the size of blocks from the
    number of scales, which is wrong if the last block of a row or column is smaller.

    settings: a `quantization_config` of a method that is read.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in _FP8_DTYPES and not name.endswith(("_scale", "_scale_inv", ".scale")):
            _check_fp8(name, tensor, settings.get("weight_block_size"), tensors)
        elif name.endswith("_blocks") and settings.get("quant_method") == "mxfp4":
            _check_mxfp4(name, tensor, tensors)


def _check_fp8(
    name: str, tensor: StoredTensor, block: Any, tensors: Mapping[str, StoredTensor]
) -> None:
    base, _, leaf = name.rpartition(".")
    # the last two as in DeepSeek V4 and in Mistral Large 4
    spellings = (f"{name}_scale_inv", f"{base}.scale", f"{base}.qscale_{leaf}")
    scales = next((tensors[spelling] for spelling in spellings if spelling in tensors), None)
    if scales is None:
        raise ModelError(
            f"{tensor.file}: tensor {name} has the dtype {tensor.dtype}, and there is no tensor "
            f"{spellings[0]} with its scales"
        )
    if scales.shape in ((), (1,)):  # one for the whole matrix
        return
    if not _is_grid(tensor.shape, scales.shape, block):
        size = "" if block is None else f" in blocks of {list(block)}"
        raise ModelError(
            f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, and its scales "
            f"{list(scales.shape)}: only whole blocks are read{size}"
        )


def _is_grid(shape: tuple[int, ...], scales: tuple[int, ...], block: Any) -> bool:
    """Whether scales cut a matrix into equal blocks, of the given size or larger than it."""
    if len(shape) != len(scales) or len(shape) < 2 or shape[:-2] != scales[:-2]:
        return False
    for axis in (-2, -1):
        size, count = shape[axis], scales[axis]
        if count < 1 or size % count:
            return False
        if block is not None and count > 1 and size // count != int(block[axis]):
            return False
        if block is not None and count == 1 and size > int(block[axis]):
            return False
    return True


def _check_mxfp4(name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> None:
    """Blocks are [experts, rows, scales of a row, 16], two numbers in each byte."""
    scales = tensors.get(f"{name.removesuffix('_blocks')}_scales")
    if scales is None:
        raise ModelError(f"{tensor.file}: there is no tensor with the scales of {name}")
    if tensor.shape != (*scales.shape, _MXFP4_BLOCK // 2):
        raise ModelError(
            f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, and its scales "
            f"{list(scales.shape)}: must be one scale for each {_MXFP4_BLOCK} numbers"
        )


def log_dequantised(
    source: str, settings: Mapping[str, Any], model: Any, dtype: torch.dtype
) -> None:
    """Say in the log what the dequantised weights take."""
    log.info(
        "%s: weights quantised with %s are dequantised to %s: they take %s bytes of memory",
        source,
        _READ[_method(settings)],
        str(dtype).removeprefix("torch."),
        f"{sum(parameter.nbytes for parameter in model.parameters()):,}",
    )
