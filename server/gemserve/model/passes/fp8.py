"""The filter pass in FP8: second copies of the lower layers' matrices, in e4m3.

The filter pass only ranks tokens. The answer comes from the model's own weights: the pass over the
kept tokens and decoding do not use these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from gemserve.errors import ConfigError
from gemserve.model.shape import QKV
from gemserve.model.shared_tree import shared_tree
from gemserve_kernels.fp8 import quantise_rows, scaled_product

# takes left, its scales, right, its scales, dtype of the result: see `gemserve_kernels.fp8`
Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
]
_STEP = 16  # the hardware's products need sizes that are multiples of this


class FP8Linear(nn.Module):
    """`linear` with a weight in e4m3, a scale for each output, and one for each token."""

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        super().__init__()
        self.values, self.scales = quantise_rows(linear.weight)
        self.bias = linear.bias
        self._product = product

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[…, inputs] → […, outputs], in the same dtype."""
        rows, scales = quantise_rows(states.flatten(0, -2))
        out = self._product(rows, scales, self.values, self.scales, states.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.unflatten(0, states.shape[:-1])


def fp8_layers(layers: Iterable[nn.Module], product: Product = scaled_product) -> nn.ModuleList:
    """`layers` 0..r with FP8 matrices: all of those below r, and those of q and k in layer r.

    Everything but the matrices is shared with `layers`, which do not change.
    """
    made: list[nn.Module] = []
    originals = list(layers)
    for index, layer in enumerate(originals):
        tree = shared_tree(layer)
        for name, linear in _matrices(layer, is_last=index == len(originals) - 1):
            parent, _, leaf = name.rpartition(".")
            setattr(tree.get_submodule(parent), leaf, FP8Linear(linear, product))
        made.append(tree)
    return nn.ModuleList(made)


def fp8_bytes(layers: Iterable[nn.Module]) -> int:
    """Bytes that `fp8_layers` of these layers take: one a number, four an output for its scale."""
    originals = list(layers)
    return sum(
        linear.weight.numel() + 4 * linear.out_features
        for index, layer in enumerate(originals)
        for _, linear in _matrices(layer, is_last=index == len(originals) - 1)
    )


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` if the device has no FP8 products with one scale a row."""
    setting = f"filter_precision=fp8, device {device}"
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(f"{setting}: needs an NVIDIA GPU of compute capability 9.0 or newer")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise ConfigError(
            f"{setting}: its compute capability is {major}.{minor}, must be 9.0 or newer"
        )


def check_sizes(layers: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` if the hardware cannot multiply matrices of these layers' sizes."""
    for index, layer in enumerate(layers):
        for name, linear in _matrices(layer, is_last=False):
            sizes = (linear.in_features, linear.out_features)
            if any(size % _STEP for size in sizes):
                raise ConfigError(
                    f"filter_precision=fp8: layer {index}, {name} has {sizes[0]} inputs and "
                    f"{sizes[1]} outputs; both must be multiples of {_STEP}"
                )


def _matrices(layer: nn.Module, *, is_last: bool) -> list[tuple[str, nn.Linear]]:
    """A layer's linear modules. For the last layer only those that make queries and keys."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and (not is_last or QKV.search(f"{name}.weight"))
    ]
