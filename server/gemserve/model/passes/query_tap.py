"""Records the queries that a filter needs from a pass, and ends the pass at a layer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from gemserve.model.passes.transfer import to_device


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterTap:
    """Ends a pass at layer `layer`, whose keys go where the pass keeps its keys and values.

    `queries` records that layer and perhaps lower ones. `num_tokens`: of the whole pass.
    """

    layer: int
    queries: QueryTap
    num_tokens: int
