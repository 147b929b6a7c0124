"""The keys and values of one sequence, for as many layers as its pass runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Per-layer geometry of a model's KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_token(self, num_layers: int) -> int:
        """Keys and values together."""
        return 2 * num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVSpan:
    """Room for `capacity` tokens in layers 0..num_layers−1, filled in order."""

    def __init__(
        self, shape: KVShape, *, num_layers: int, capacity: int, device: torch.device
    ) -> None:
        self._data = torch.empty(
            num_layers,
            2,
            shape.num_kv_heads,
            capacity,
            shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [kv_heads, tokens, head_dim] keys and values at positions `start`…"""
        stop = start + key.shape[1]
        self._data[layer, 0, :, start:stop] = key
        self._data[layer, 1, :, start:stop] = value

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values 0..stop−1, each [kv_heads, stop, head_dim]."""
        return self._data[layer, 0, :, :stop], self._data[layer, 1, :, :stop]
