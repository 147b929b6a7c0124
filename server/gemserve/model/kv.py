"""The keys and values of one sequence, for as many layers as its pass runs: views of memory."""

from __future__ import annotations

import torch

from gemserve.cost import ModelShape


class KVSpan:
    """Room for `capacity` tokens in layers 0..num_layers−1, filled in order.

    `memory`: flat, at least `units(...)` · kv_heads · head_dim elements, of which the first are
    used; whoever owns it decides how long the span lives.
    """

    def __init__(
        self, memory: torch.Tensor, shape: ModelShape, *, num_layers: int, capacity: int
    ) -> None:
        width = shape.num_kv_heads * shape.head_dim
        size = 2 * num_layers * capacity * width
        self._data = memory[:size].view(num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim)

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [kv_heads, tokens, head_dim] keys and values at positions `start`…"""
        stop = start + key.shape[1]
        self._data[layer, 0, :, start:stop] = key
        self._data[layer, 1, :, start:stop] = value

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values 0..stop−1, each [kv_heads, stop, head_dim]."""
        return self._data[layer, 0, :, :stop], self._data[layer, 1, :, :stop]


class Memory:
    """The bytes behind a pool of units; one unit holds one token's K or V in one layer."""

    def __init__(
        self, num_units: int, shape: ModelShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._width = shape.num_kv_heads * shape.head_dim
        self._flat = torch.empty(num_units * self._width, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    def move(self, source: int, target: int, size: int) -> None:
        """Copy units down; ranges that overlap are copied piece by piece, lowest first."""
        assert target < source
        step = min(size, source - target)
        for done in range(0, size, step):
            count = min(step, size - done)
            self._units(target + done, count).copy_(self._units(source + done, count))

    def kv(self, start: int, *, num_layers: int, capacity: int) -> KVSpan:
        """Keys and values from unit `start` on."""
        units = self._units(start, 2 * num_layers * capacity)
        return KVSpan(units, self._shape, num_layers=num_layers, capacity=capacity)

    def keys(self, start: int, num_tokens: int) -> torch.Tensor:
        """Keys of one layer from unit `start` on: [kv_heads, num_tokens, head_dim]."""
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        return self._units(start, num_tokens).view(heads, num_tokens, dim)

    def _units(self, start: int, count: int) -> torch.Tensor:
        return self._flat[start * self._width : (start + count) * self._width]
