"""Checks that the tensors of an adapter's file are those that the model needs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from gemserve.cost import ModelShape
from gemserve.errors import AdapterError, shown

# Norms square what they get, in float32. The square of a larger number is infinite, and what a norm
# divides by infinity is nothing.
LARGEST = math.sqrt(torch.finfo(torch.float32).max)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_heads(kind: str, shape: ModelShape) -> None:
    """Raise `AdapterError` if adapters of a kind that has a part in attention are not for a model.

    Their tensors are of one head size, and memory for layers of several sizes is padded.
    """
    if shape.is_padded:
        raise AdapterError(
            f"type {kind!r}: not for this model: the heads of its layers, or of its keys and "
            "values, differ in size; types 'lora' and 'activation' are"
        )


def take(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The named tensors, on the model's device.

    Every named tensor must be in the file, and no other. All must be floating point and finite.
    Raises `AdapterError` naming the first mismatch.
    """
    for name in tensors:
        if name not in shapes:
            raise AdapterError(
                f"tensor {shown(name)}: unknown; expected {', '.join(sorted(shapes))}"
            )
    taken: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise AdapterError(
                f"tensor {name!r}: missing; it has {shown(', '.join(sorted(tensors)))}"
            )
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"tensor {name!r}: has shape {shown(list(tensor.shape))}, the base model needs "
                f"{list(shape)}"
            )
        taken[name] = check_values(name, tensor, dtype).to(device)
    return taken


def check_squares(name: str, tensor: torch.Tensor) -> None:
    """Raise `AdapterError` if the square of a value is infinite in float32."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if not largest <= LARGEST:  # false for NaN, too
        raise AdapterError(
            f"tensor {shown(name)}: holds {largest:.3g}; squares of values above {LARGEST:.3g} "
            "overflow float32"
        )


def check_values(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`. Raises `AdapterError` for values that would make answers NaN."""
    if tensor.dtype not in _DTYPES:
        raise AdapterError(
            f"tensor {shown(name)}: is {tensor.dtype}, must be floating point: "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if not bool(tensor.isfinite().all()):
        raise AdapterError(f"tensor {shown(name)}: holds NaN or infinite values")
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        raise AdapterError(f"tensor {shown(name)}: holds values too large for {dtype}")
    return converted
