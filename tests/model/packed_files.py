"""Checkpoints whose matrices are packed, written by the definitions of their formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from gemserve.model.loading.loader import BUILTIN_PATH
from tests.architectures import families

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that lies in each four bits of a word


@dataclass(frozen=True, kw_only=True)
class Form:
    """A method with its settings. `group`: −1 for a scale of all inputs."""

    method: str
    group: int = 32
    is_symmetric: bool = False
    bits: int = 4
    version: int = 1  # of GPTQ's format

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.method == "compressed-tensors" else torch.float16

    @property
    def settings(self) -> dict[str, Any]:
        """The `quantization_config`."""
        stated: dict[str, Any] = {"quant_method": self.method}
        if self.method == "gptq":
            version = {"checkpoint_format": "gptq" if self.version == 1 else "gptq_v2"}
            own = {"sym": self.is_symmetric, "desc_act": False, **version}
        elif self.method == "awq":
            own = {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        else:
            weights = {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": self.is_symmetric,
                "strategy": "channel" if self.group == -1 else "group",
                "group_size": None if self.group == -1 else self.group,
                "dynamic": False,
            }
            few = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
            groups = {"format": "pack-quantized", "config_groups": {"group_0": few}}
            return {**stated, **groups, "ignore": ["lm_head"], "kv_cache_scheme": None}
        return {**stated, **own, "bits": self.bits, "group_size": self.group}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """codes [outs, ins]; scales float32 and zeros [outs, groups]; `group`: inputs of one."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int

    def spread(self, some: np.ndarray) -> np.ndarray:
        """What groups have, for each input."""
        return some.repeat(self.group, axis=1)[:, : self.codes.shape[1]]

    def numbers(self) -> torch.Tensor:
        off = self.codes.astype(np.float32) - self.spread(self.zeros).astype(np.float32)
        return torch.from_numpy(off * self.spread(self.scales))


def quantised(weight: torch.Tensor, form: Form) -> Matrix:
    """Rounded to the nearest codes."""
    outs, ins = weight.shape
    group = ins if form.group == -1 else form.group
    most, middle = 2**form.bits - 1, 2 ** (form.bits - 1)
    padded = np.zeros((outs, -(-ins // group) * group), dtype=np.float32)
    padded[:, :ins] = weight.float().numpy()
    few = padded.reshape(outs, -1, group)
    if form.is_symmetric:
        scales = np.abs(few).max(-1) / (middle - 1)
        zeros = np.full(scales.shape, middle)
    else:
        low, high = few.min(-1).clip(max=0), few.max(-1).clip(min=0)
        scales = (high - low) / most
        zeros = np.rint(-low / scales).clip(0, most).astype(int)
    rounded = torch.from_numpy(scales).to(form.scale_dtype).float().numpy()
    rounded[rounded == 0] = 1  # of groups of zeros
    codes = np.rint(few / rounded[..., None] + zeros[..., None]).clip(0, most)
    flat = codes.reshape(outs, -1)[:, :ins].astype(int)
    return Matrix(codes=flat, scales=rounded, zeros=zeros, group=group)


def words(numbers: np.ndarray, bits: int, order: Sequence[int] = ()) -> np.ndarray:
    """uint32 [a, words] with the numbers [a, b]; `order`: the number in the word's lowest bits …"""
    per_word = 32 // bits
    rows, columns = numbers.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), dtype=np.uint32)
    padded[:, :columns] = numbers
    made = np.zeros((rows, padded.shape[1] // per_word), dtype=np.uint32)
    for place, number in enumerate(order or range(per_word)):
        made |= padded[:, number::per_word] << np.uint32(bits * place)
    return made


def packed(name: str, matrix: Matrix, form: Form) -> Tensors:
    """The tensors of the module `name`."""
    outs, ins = matrix.codes.shape
    scales = torch.from_numpy(matrix.scales).to(form.scale_dtype)
    if form.method == "compressed-tensors":
        made = {
            "weight_packed": integers(words(matrix.codes, form.bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outs, ins]),
        }
        if not form.is_symmetric:
            made["weight_zero_point"] = integers(words(matrix.zeros.T, form.bits).T)
    elif form.method == "gptq":
        zeros = words(matrix.zeros.T, form.bits)
        if form.version == 1:  # less 1, which may borrow from the next zero point
            zeros = zeros - np.uint32(0x11111111 if form.bits == 4 else 0x01010101)
        made = {
            "qweight": integers(words(matrix.codes, form.bits).T),
            "qzeros": integers(zeros),
            "scales": scales.t(),
            "g_idx": (torch.arange(ins) // matrix.group).int(),
        }
    else:
        made = {
            "qweight": integers(words(matrix.codes.T, 4, AWQ_ORDER)),
            "qzeros": integers(words(matrix.zeros.T, 4, AWQ_ORDER)),
            "scales": scales.t(),
        }
    return {f"{name}.{last}": tensor.contiguous() for last, tensor in made.items()}


def integers(made: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(made).view(np.int32))


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def save(
    folder: Path,
    form: Form,
    *,
    family: str = "llama",
    is_packed: Callable[[str], bool] = is_projection,
    **changes: Any,
) -> dict[str, Matrix]:
    """Save a tiny model of the family, and return its packed matrices by their weights' names."""
    families.build(family, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(folder)
    made: dict[str, Matrix] = {}
    tensors: Tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if is_packed(name):
            made[name] = quantised(values, form)
            tensors |= packed(name.removesuffix(".weight"), made[name], form)
        else:
            tensors[name] = values
    write(folder, tensors)
    state(folder, form.settings)
    return made


def write(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def state(folder: Path, settings: dict[str, Any]) -> None:
    """Replace the `quantization_config`."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
