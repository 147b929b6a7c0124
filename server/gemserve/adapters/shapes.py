"""Checks of what a file holds against what a model needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemserve.errors import AdapterError


def take(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The named tensors, on the model's device. Raises `AdapterError` naming the first mismatch.

    None may be missing, none may be left over, all must be floating point and finite.
    """
    for name in tensors:
        if name not in shapes:
            raise AdapterError(f"tensor {name!r}: unknown; expected {', '.join(sorted(shapes))}")
    taken: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise AdapterError(f"tensor {name!r}: missing; it has {', '.join(sorted(tensors))}")
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"tensor {name!r}: has shape {list(tensor.shape)}, the base model needs "
                f"{list(shape)}"
            )
        check_values(name, tensor)
        taken[name] = tensor.to(device=device, dtype=dtype)
    return taken


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Raise `AdapterError` for numbers that would make every answer NaN."""
    if not tensor.is_floating_point():
        raise AdapterError(f"tensor {name!r}: is {tensor.dtype}, must be floating point")
    if not bool(tensor.isfinite().all()):
        raise AdapterError(f"tensor {name!r}: holds NaN or infinite values")
