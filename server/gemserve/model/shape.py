"""Reads a model's geometry from its modules, which may be on the meta device."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from gemserve.cost import ModelShape
from gemserve.errors import ModelError

QKV = re.compile(r"self_attn\.(?:q|k|v|qkv)_proj\.weight$")


def decoder_path(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """Attribute names that lead from the model to the module that owns its layers."""
    for name, module in model.named_modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            return tuple(name.split(".")) if name else ()
    others = (
        f"{name} (of {type(module[0]).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    found = next(others, "none")
    raise ModelError(
        f"{type(model).__name__} cannot be served: a filter runs a decoder's lowest layers, and "
        f"needs a list named `layers` of its {num_layers} layers; such a list here: {found}"
    )


def follow(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def shape_of(model: Any, dtype: torch.dtype) -> ModelShape:
    """The shape of a causal LM whose KV cache has `dtype`.

    If layers differ, the number of their weights is the mean. For a mixture of experts all experts
    count, which is an upper bound of the work of a token.
    """
    config = model.config
    heads: int = config.num_attention_heads
    layers = follow(model, decoder_path(model, config.num_hidden_layers)).layers
    matrices = [
        {name: p.numel() for name, p in layer.named_parameters() if p.dim() >= 2}
        for layer in layers
    ]
    projections = [sum(n for name, n in of.items() if QKV.search(name)) for of in matrices]
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_params=sum(sum(of.values()) for of in matrices) // len(matrices),
        qkv_params=max(projections),
        element_bytes=dtype.itemsize,
    )
