"""How much memory a model's weights take, on the device and on the host."""

from __future__ import annotations

from typing import Any

import torch

from gemserve.config import FilterPrecision
from gemserve.cost import WeightPlan, plan_weights
from gemserve.model.passes.fp8 import fp8_bytes
from gemserve.model.passes.offload import NUM_PLACES
from gemserve.model.shape import decoder_path, follow, layers_of


def weights_of(
    model: Any,
    dtype: torch.dtype,
    *,
    filter_layer: int,
    filter_precision: FilterPrecision,
    offload_layers: int,
) -> WeightPlan:
    """The weight plan of a transformers model whose weights have `dtype` or are in blocks.

    The model may be on the meta device. What is in blocks has its `stored_bytes`.
    """
    layers = list(layers_of(follow(model, decoder_path(model, model.config.num_hidden_layers))))
    layer_bytes = [_bytes(layer, dtype) for layer in layers]
    total = _bytes(model, dtype)
    is_fp8 = filter_precision == "fp8"
    return plan_weights(
        layer_bytes,
        rest_bytes=total - sum(layer_bytes),
        fp8_bytes=fp8_bytes(layers[: filter_layer + 1]) if is_fp8 else 0,
        offload_layers=offload_layers,
        num_places=NUM_PLACES,
    )


def _bytes(module: Any, dtype: torch.dtype) -> int:
    return sum(
        getattr(parameter, "stored_bytes", parameter.numel() * dtype.itemsize)
        for parameter in module.parameters()
    )
