"""Reads a model's geometry from its modules, which may be on the meta device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemserve.cost import ModelShape
from gemserve.errors import ModelError

QKV = re.compile(
    r"self_attn\.(?:(?:q|k|v|qkv|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)\.weight$"
    r"|attn\.(?:c_attn|Wqkv)\.weight$"
)


# names of the list of a decoder's layers; the second one is GPT-2's, the third DBRX's
_LISTS = ("layers", "h", "blocks")


def decoder_path(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """Attribute names that lead from the model to the module that owns its layers."""
    for name, module in model.named_modules():
        layers = [module._modules.get(kind) for kind in _LISTS]
        if any(isinstance(each, nn.ModuleList) and len(each) == num_layers for each in layers):
            return tuple(name.split(".")) if name else ()
    lists = (
        (name, type(module[0]).__name__)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    name, kind = next(lists, ("", ""))
    reason = f"it has no list of its {num_layers} layers, of which a filter runs the lowest"
    found = (module._modules.get("layers") for module in model.modules())
    counts = (len(each) for each in found if isinstance(each, nn.ModuleList))
    if (count := next(counts, num_layers)) != num_layers:
        reason += f": its list has {count} blocks, of which each attends, or is run, several times"
    if "encoder" in name:
        reason = f"its layers ({name}, of {kind}) are an encoder's, and only decoders are served"
    elif name:
        reason = f"the list of its layers ({name}, of {kind}) is not one of a decoder's blocks"
    raise ModelError(f"{type(model).__name__} cannot be served: {reason}")


def list_name(decoder: Any) -> str:
    """The name of the list of a decoder's layers."""
    return next(name for name in _LISTS if name in decoder._modules)


def layers_of(decoder: Any) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(decoder, list_name(decoder))
    return layers


def attention_of(layer: Any) -> Any:
    """A layer's module of self-attention, or None if it has another name."""
    names = ("self_attn", "attn", "self_attention", "attention")
    return next((getattr(layer, name) for name in names if hasattr(layer, name)), None)


def follow(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def shape_of(model: Any, dtype: torch.dtype) -> ModelShape:
    """The shape of a causal LM whose KV cache has `dtype`.

    Layers may differ in their heads. The memory is the same for all: see `ModelShape`. The number
    of weights is the mean over the layers, that of projections over those that have them. For a
    mixture of experts all experts count, which is an upper bound of the work of a token.
    """
    config = model.config
    layers = list(layers_of(follow(model, decoder_path(model, config.num_hidden_layers))))
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    pairs = zip(layers, kinds, strict=True)
    attentions = [attention_of(layer) for layer, kind in pairs if kind != "linear_attention"]
    known = [each for each in attentions if each is not None]  # others may have a recurrent state
    sizes = {_heads_of(each, config) for each in known or [None]}
    matrices = [
        {name: p.numel() for name, p in layer.named_parameters() if p.dim() >= 2}
        for layer in layers
    ]
    projections = [sum(n for name, n in of.items() if QKV.search(name)) for of in matrices]
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=max(kv_heads for kv_heads, _, _ in sizes),
        head_dim=max(max(key, value) for _, key, value in sizes),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layer_params=_mean([sum(of.values()) for of in matrices]),
        qkv_params=_mean([count for count in projections if count]),
        element_bytes=dtype.itemsize,
        is_padded=len(sizes) > 1 or any(key != value for _, key, value in sizes),
    )


def _mean(counts: Sequence[int]) -> int:
    return sum(counts) // max(1, len(counts))


def _heads_of(attention: Any, config: Any) -> tuple[int, int, int]:
    """How many key heads a layer has, and the sizes of a key and of a value.

    They are what the layer hands to its attention function, which `find_reaches` compares. What its
    module does not say is as in the config.
    """
    heads: int = config.num_attention_heads
    groups = getattr(attention, "num_key_value_groups", None)
    if groups is None:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    else:
        kv_heads = heads // groups
    key = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None)
    if key is None:
        key = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, key, getattr(attention, "v_head_dim", None) or key
