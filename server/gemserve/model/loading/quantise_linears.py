"""Quantises a model's matrices when it is loaded: weights only, in blocks of 32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemserve.config import Quantise
from gemserve.errors import ConfigError
from gemserve.model.loading.expert_matrices import expert_matrices, multiply_one_by_one
from gemserve_kernels.blocks import FORMATS, BlockFormat, Blocks, BlockWeight, stored_bytes

_INPUTS = 32
_WIDTHS = (0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's range, for int4
_ROWS = 4096  # that are looked at together
_FORMATS = {known.name: known for known in FORMATS}
_INT8, _INT4 = _FORMATS["Q8_0"], _FORMATS["Q4_1"]


def quantise(model: Any, choice: Quantise) -> int:
    """Quantise the matrices of linear layers, embeddings and experts; how many they are.

    int8: the largest number of a block becomes 127. int4: 16 values at even distances, but the
    embedding and the head are in int8, where few bits cost the most. Those whose number of inputs
    is not a multiple of 32 stay. Raises `ConfigError` if nothing is left to quantise.
    """
    made: dict[int, nn.Parameter] = {}
    for module, name, kind in _matrices(model, choice):
        weight = module._parameters[name]
        if id(weight) not in made:
            experts = weight.shape[0] if weight.dim() == 3 else None
            matrices = [weight] if experts is None else weight
            blocks = Blocks.joined([_blocks(matrix, kind, choice) for matrix in matrices])
            made[id(weight)] = nn.Parameter(
                BlockWeight(blocks, weight.dtype, experts), requires_grad=False
            )
        module._parameters[name] = made[id(weight)]
    if not made:
        raise ConfigError(f"quantise={choice}: the model has no matrices that can be quantised")
    multiply_one_by_one(model)
    return len(made)


def plan_quantised(empty: Any, choice: Quantise) -> None:
    """Note what the matrices of a model on the meta device will take."""
    for module, name, kind in _matrices(empty, choice):
        weight = module._parameters[name]
        weight.stored_bytes = stored_bytes(kind, *weight.flatten(0, -2).shape)


def _matrices(model: Any, choice: Quantise) -> Iterator[tuple[Any, str, BlockFormat]]:
    """Modules, the names of their parameters, and what these will be."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found: list[tuple[nn.Module, str]] = [
        (module, "weight")
        for module in model.modules()
        if type(module) is nn.Linear or isinstance(module, nn.Embedding)
    ]
    found += [(module, name) for _, module, name in expert_matrices(model)]
    for module, name in found:
        weight = module.get_parameter(name)
        if hasattr(weight, "stored_bytes") or weight.shape[-1] % _INPUTS:
            continue
        is_end = any(module is end for end in ends)
        yield module, name, _INT8 if choice == "int8" or is_end else _INT4


def _blocks(weight: torch.Tensor, kind: BlockFormat, choice: Quantise) -> Blocks:
    blocks = Blocks(kind, _int8(weight) if kind is _INT8 else _int4(weight), *weight.shape)
    _check_finite(weight, blocks, choice)
    return blocks


def _int8(weight: torch.Tensor) -> torch.Tensor:
    """A file's bytes of Q8_0."""
    few = weight.detach().float().unflatten(1, (-1, _INPUTS))
    scale = _scale(few.abs().amax(-1, keepdim=True) / 127)
    numbers = (few * _inverse(scale)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_bytes(scale), _bytes(numbers)], dim=-1).flatten()


def _int4(weight: torch.Tensor) -> torch.Tensor:
    """A file's bytes of Q4_1.

    Of some widths of a range the one is taken whose squared error is the smallest: what lies
    outside is cut off, and all others are rounded less.
    """
    few = weight.detach().float().unflatten(1, (-1, _INPUTS))
    least, most = few.aminmax(dim=-1, keepdim=True)
    middle, half = (least + most) / 2, (most - least) / 2
    best = _rounded(few, middle - half, half)
    for width in _WIDTHS:
        made = _rounded(few, middle - width * half, width * half)
        is_better = made[-1] < best[-1]
        best = [torch.where(is_better, *pair) for pair in zip(made, best, strict=True)]
    scale, least, numbers, _ = best
    low, high = numbers.chunk(2, dim=-1)
    return torch.cat([_bytes(scale), _bytes(least), low | high << 4], dim=-1).flatten()


def _rounded(few: torch.Tensor, least: torch.Tensor, half: torch.Tensor) -> list[torch.Tensor]:
    """Scales, minima, numbers from 0 to 15, and the squared errors of blocks."""
    least, scale = least.half(), _scale(half / 7.5)
    numbers = ((few - least.float()) * _inverse(scale)).round().clamp(0, 15)
    off = numbers * scale.float() + least.float() - few
    return [scale, least, numbers.to(torch.uint8), off.square().sum(-1, keepdim=True)]


def _scale(wanted: torch.Tensor) -> torch.Tensor:
    """In float16, and not 0 if it was not 0."""
    least = torch.finfo(torch.float16).smallest_normal / 1024
    return torch.where(wanted > 0, wanted.clamp(min=least), wanted).half()


def _check_finite(weight: torch.Tensor, blocks: Blocks, choice: Quantise) -> None:
    largest = float(weight.detach().abs().max())
    for first in range(0, blocks.outs, _ROWS):
        some = blocks.numbers(torch.float32, first, min(_ROWS, blocks.outs - first))
        if not some.isfinite().all():
            raise ConfigError(
                f"quantise={choice}: the model has numbers of {largest:.3g}, which are too large "
                "for scales in float16; must be off"
            )


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale.float())


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)
