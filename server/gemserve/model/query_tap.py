"""Records what a filter needs from a pass: queries of some rows, and keys of one layer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from gemserve.model.transfer import to_device


class FilterLayerReached(Exception):
    """Ends a filter pass at the filter layer. Its attention and MLP are not needed."""


@dataclass(slots=True, kw_only=True)
class QueryTap:
    """Collects the queries of the tokens at positions `rows`, in each of `layers`.

    Both are ascending. `queries`: [layers, heads, rows, head_dim], after RoPE, filled as chunks
    arrive. `scales` and `softcaps` are those of the layers' own attention.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    queries: torch.Tensor
    scales: dict[int, float] = field(default_factory=dict)
    softcaps: dict[int, float | None] = field(default_factory=dict)

    def record(
        self, layer: int, query: torch.Tensor, start: int, scale: float, softcap: float | None
    ) -> None:
        """Store the queries of a chunk [heads, tokens, head_dim] that are in `rows`."""
        if layer not in self.layers:
            return
        self.scales[layer], self.softcaps[layer] = scale, softcap
        low = bisect_left(self.rows, start)
        high = bisect_left(self.rows, start + query.shape[1])
        if low < high:
            wanted = to_device([r - start for r in self.rows[low:high]], torch.long, query.device)
            self.of(layer)[:, low:high] = query[:, wanted]

    def of(self, layer: int) -> torch.Tensor:
        """The queries of one layer: [heads, rows, head_dim]."""
        return self.queries[self.layers.index(layer)]


@dataclass(slots=True, kw_only=True)
class FilterTap:
    """Ends a filter pass at layer `layer`, where it collects the key of every token.

    `keys`: [kv_heads, num_tokens, head_dim], after RoPE, filled as chunks arrive. `queries` records
    that layer and perhaps lower ones.
    """

    layer: int
    keys: torch.Tensor
    queries: QueryTap

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])

    def record(self, key: torch.Tensor, start: int) -> None:
        """Store a chunk's keys [kv_heads, tokens, head_dim], from `start` on."""
        self.keys[:, start : start + key.shape[1]] = key


@dataclass(slots=True, kw_only=True)
class QueriesOnly(FilterTap):
    """Ends a pass at a layer as well, but collects no keys. `length`: of the whole sequence."""

    length: int

    @property
    def num_tokens(self) -> int:
        return self.length

    def record(self, key: torch.Tensor, start: int) -> None:
        """Store nothing."""
