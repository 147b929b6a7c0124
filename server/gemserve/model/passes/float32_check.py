"""A model's lower layers in float32, for comparisons that half precision would blur.

The weights are those of the model, rounded as they are. One layer at a time is converted, so the
comparison needs little memory beside the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemserve.model.shape import layers_of, list_name
from gemserve.model.shared_tree import shared_tree
from gemserve_kernels.blocks import BlockWeight

_ROWS = 4096  # of a large matrix that are converted at once
_HALF = (torch.bfloat16, torch.float16)


def num_layers_of_all_kinds(layers: nn.ModuleList, *also: Any) -> int:
    """How many of the lowest layers it takes to have one of every kind, but at least two.

    Layers are of one kind if their modules, the shapes of their weights and their settings are the
    same, and each of `also`, which has a value for each layer.
    """
    first: dict[Any, int] = {}
    for index, pair in enumerate(zip(layers, *also, strict=True)):
        first.setdefault((_kind(pair[0]), *pair[1:]), index)
    return min(len(layers), max(2, 1 + max(first.values())))


def _kind(layer: nn.Module) -> Any:
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple(
                (key, repr(value))
                for key, value in sorted(vars(module).items())
                if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
            ),
        )
        for name, module in layer.named_modules()
    )


def float32_tree(model: Any, path: tuple[str, ...], num_layers: int) -> Any:
    """The model with its lowest `num_layers` layers only, and in float32.

    `path`: see `decoder_path`. The model stays as it is.
    """
    tree = shared_tree(model)
    decoder = tree
    for name in path:
        decoder = getattr(decoder, name)
    name = list_name(decoder)
    layers = list(layers_of(decoder))[:num_layers]
    setattr(decoder, name, nn.ModuleList())
    for module in tree.modules():
        if isinstance(module, nn.Embedding):
            module.forward = _Float32Rows(module)  # type: ignore[method-assign]
        elif isinstance(module, nn.Linear):
            module.forward = _Float32Product(module)  # type: ignore[assignment]
        else:
            _convert(module)
    setattr(decoder, name, nn.ModuleList([_Float32Layer(layer) for layer in layers]))
    return tree


def _convert(module: nn.Module) -> None:
    """Replace a module's own numbers of half precision."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, BlockWeight):
            numbers = parameter.blocks.numbers(torch.float32).view(parameter.shape)
            module._parameters[name] = nn.Parameter(numbers, requires_grad=False)
        elif parameter is not None and parameter.dtype in _HALF:
            module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dtype in _HALF:
            module._buffers[name] = buffer.float()


class _Float32Rows:
    """The forward function of an embedding, whose result is converted."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        rows: torch.Tensor = type(self._module).forward(self._module, *arguments, **keywords)
        return rows.float()


class _Float32Product:
    """The forward function of a large matrix, some rows of which are converted at a time."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        pieces: Iterable[torch.Tensor]
        pieces = weight.pieces(_ROWS) if isinstance(weight, BlockWeight) else weight.split(_ROWS)
        parts = [functional.linear(states, some.float()) for some in pieces]
        out = torch.cat(parts, dim=-1)
        return out if bias is None else out + bias.float()


class _Float32Layer(nn.Module):
    """A decoder layer that is converted for each call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        tree = shared_tree(self.layer)
        for module in tree.modules():
            _convert(module)
        return tree(hidden_states, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Read the wrapped layer's attributes: decoders look up their layers' kinds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)
