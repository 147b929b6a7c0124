"""From the host to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on `device`: [values]. What is queued there later finds them; the host goes on."""
    return staged(values, dtype, device).to(device, non_blocking=True)


def staged(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on the host, ready for a copy to `device` that the host does not wait for.

    It may be dropped at once: torch keeps its memory until the copy is over.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
