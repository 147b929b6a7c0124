"""GemFilter as published: Algorithm 2, with the pooling of its code (mean) by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemserve.contract.filter_options import FilterParams
from gemserve.cost import ModelShape
from gemserve.filtering.selector import Evidence, Selector
from gemserve_kernels import raw_scores


@dataclass(frozen=True, slots=True)
class GemFilter(Selector):
    """Top-k of the pooled sum over heads of the last token's raw scores. Protects nothing."""

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        layer = evidence.filter_layer
        scores = raw_scores(
            layer.queries[:, -1], layer.keys, scale=layer.scale, softcap=layer.softcap
        )
        return evidence.backend.pooled(scores, kind=params.pooling)

    def score_flops(self, shape: ModelShape, num_tokens: int) -> float:
        # a group's queries are summed, so that one row for each key head meets the keys
        return 2.0 * shape.num_kv_heads * shape.head_dim * num_tokens
