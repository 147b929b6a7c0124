"""SnapKV (Li et al. 2024): read everything, then evict keys and values layer by layer.

It is a baseline, because it does not shorten prompt processing. Each layer and key head keeps
different tokens, so there is no single selection to show. Kept keys stay at their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemserve.cost import ModelShape
from gemserve_kernels import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV:
    """`observed`: rows at the prompt's end that vote, and are kept. `width`: of the pooling."""

    observed: int = 32
    width: int = 5

    def rows(self, num_tokens: int) -> range:
        """Positions of the queries that `select` needs."""
        return range(max(0, num_tokens - self.observed), num_tokens)

    def score_flops(self, shape: ModelShape, num_tokens: int) -> float:
        """FLOPs of the votes over a prompt of `num_tokens` tokens in all layers."""
        return self.observed * shape.row(num_tokens) * shape.num_layers

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        keep: int,
        backend: Backend,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """One layer's kept positions, ascending: [kv_heads, keep], int64.

        `query`: [heads, rows, head_dim], the prompt's last rows; `key`: [kv_heads, tokens,
        head_dim]; both post-RoPE.
        """
        kv_heads, num_tokens, _ = key.shape
        num_rows = min(query.shape[1], keep)
        tail = torch.arange(num_tokens - num_rows, num_tokens, device=key.device)
        tail = tail.expand(kv_heads, -1)
        if keep == num_rows:
            return tail
        votes = backend.grouped_probabilities(query, key, scale=scale, softcap=softcap)
        votes = votes[:, : num_tokens - num_rows]
        smooth = backend.pooled(votes, kind="mean", width=self.width)
        best = smooth.topk(keep - num_rows, dim=1).indices.sort(dim=1).values
        return torch.cat([best, tail], dim=1)
