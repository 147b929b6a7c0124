"""Quantises a model's matrices when it is loaded: weights only, in blocks of 32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemserve.config import Quantise
from gemserve.errors import ConfigError
from gemserve_kernels.blocks import FORMATS, BlockFormat, Blocks, BlockWeight, stored_bytes

_INPUTS = 32
_WIDTHS = (0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's range, for int4
_ROWS = 4096  # that are looked at together
_FORMATS = {known.name: known for known in FORMATS}
_INT8, _INT4 = _FORMATS["Q8_0"], _FORMATS["Q4_1"]


def quantise(model: Any, choice: Quantise) -> int:
    """Quantise the matrices of linear layers and embeddings, and return how many they are.

    int8: the largest number of a block becomes 127. int4: 16 values at even distances, but the
    embedding and the head are in int8, where few bits cost the most. Those whose number of inputs
    is not a multiple of 32 stay. Raises `ConfigError` if nothing is left to quantise.
    """
    made: dict[int, nn.Parameter] = {}
    for module, kind in _matrices(model, choice):
        weight = module.weight
        if id(weight) not in made:
            raw = _int8(weight) if kind is _INT8 else _int4(weight)
            blocks = Blocks(kind, raw, *weight.shape)
            _check_finite(weight, blocks, choice)
            made[id(weight)] = nn.Parameter(BlockWeight(blocks, weight.dtype), requires_grad=False)
        module.weight = made[id(weight)]
    if not made:
        raise ConfigError(f"quantise={choice}: the model has no matrices that can be quantised")
    return len(made)


def plan_quantised(empty: Any, choice: Quantise) -> None:
    """Note what the matrices of a model on the meta device will take."""
    for module, kind in _matrices(empty, choice):
        module.weight.stored_bytes = stored_bytes(kind, *module.weight.shape)


def _matrices(model: Any, choice: Quantise) -> Iterator[tuple[Any, BlockFormat]]:
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in list(model.modules()):
        is_matrix = type(module) is nn.Linear or isinstance(module, nn.Embedding)
        if (
            not is_matrix
            or hasattr(module.weight, "stored_bytes")
            or module.weight.shape[1] % _INPUTS
        ):
            continue
        is_end = any(module is end for end in ends)
        yield module, _INT8 if choice == "int8" or is_end else _INT4


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
