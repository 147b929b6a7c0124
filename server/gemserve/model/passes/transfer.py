"""Copies numbers from the host to the device without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[float] | npt.NDArray[np.int64]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`: [values]. Work queued there later sees them."""
    return on_host(values, dtype, device).to(device, non_blocking=True)


def on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on the host, ready for an asynchronous copy to `device`.

    It may be dropped at once: torch keeps its memory until the copy is over.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
