"""GemFilter as published: Algorithm 2, with the pooling of its code (mean) by default."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemserve.filtering.selector import Choice, Evidence, finite
from gemserve.types import Budget, FilterParams
from gemserve_kernels import raw_scores


@dataclass(frozen=True, slots=True)
class GemFilter:
    """Top-k of the pooled sum over heads of the last token's raw scores. Protects nothing."""

    def window(self, num_tokens: int) -> int:
        return 1

    def scores(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """Pooled scores: [tokens], float32."""
        scores = raw_scores(
            evidence.queries[:, -1],
            evidence.keys,
            scale=evidence.scale,
            softcap=evidence.softcap,
        )
        return evidence.backend.pooled(scores, kind=params.pooling)

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        scores = finite(self.scores(evidence, params))
        return Choice(positions=scores.topk(budget.high).indices.sort().values)
