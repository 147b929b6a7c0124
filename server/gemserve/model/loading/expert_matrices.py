"""The matrices of a model's experts, which transformers has in one tensor for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from gemserve_kernels.blocks import TILE, BlockWeight

_NAMES = ("gate_up_proj", "down_proj")


def expert_matrices(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Parameters [experts, outs, ins] that may be in blocks: names, modules, and names in them.

    Transposed ones, which gpt-oss has, are left out, and those whose outputs fill no whole tiles.
    """
    for full, module in list(model.named_modules()):
        if getattr(module, "is_transposed", True):
            continue
        for name in _NAMES:
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3 and weight.shape[1] % TILE == 0:
                yield f"{full}.{name}", module, name


def multiply_one_by_one(model: Any) -> None:
    """Have experts multiplied one after the other if their matrices are in blocks."""
    weights = model.parameters()
    if any(isinstance(weight, BlockWeight) and weight.experts is not None for weight in weights):
        model.config._experts_implementation = "eager"
