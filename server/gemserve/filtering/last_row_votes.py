"""The rules of FastKV and CLAA, two baselines that choose by the prompt's last rows.

Both were published with the chosen tokens' hidden states carried on. Here the chosen tokens are
read again, as with every other method, so that only the choice differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemserve.contract.filter_options import FilterParams, Heads
from gemserve.filtering.selector import Evidence, Selector, TokenRange

_ROWS = 8  # rows at the prompt's end; they are kept
_WIDTH = 7  # width of the pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRowVotes(Selector):
    """Attention of the last 8 rows, averaged over heads, pooled over 7 neighbours.

    `num_layers` 1: the rule of FastKV (Jo et al. 2025). 4: that of CLAA (2602.16054), which takes
    the largest score over the filter layer and the three before it.
    """

    num_layers: int = 1

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        return list(range(max(0, num_tokens - _ROWS), num_tokens))

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        return list(range(max(0, filter_layer - self.num_layers + 1), filter_layer + 1))

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        backend = evidence.backend
        votes = [
            backend.grouped_probabilities(
                layer.queries, layer.keys, scale=layer.scale, softcap=layer.softcap
            ).sum(dim=0)
            for layer in evidence.layers.values()
        ]
        scores = backend.pooled(torch.stack(votes).amax(dim=0), kind="mean", width=_WIDTH)
        scores[list(evidence.rows)] = scores.amax() + 1
        return scores
