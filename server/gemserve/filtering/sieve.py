"""Sieve: what the end of the prompt looks at, kept in whole chunks, around protected spans."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemserve.filtering.selector import Evidence
from gemserve.filtering.spans import protected_positions
from gemserve.types import FilterParams
from gemserve_kernels import window_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """Chunks ranked by their best token; a token's score sums the window's attention to it.

    `observed`: rows of the observation window. `chunk`: tokens ranked as one. `margin`: tokens
    kept on either side of a chosen chunk, so that a passage cut by a chunk border survives.
    """

    observed: int = 16
    chunk: int = 16
    margin: int = 8

    def window(self, num_tokens: int) -> int:
        return min(self.observed, num_tokens)

    def select(self, evidence: Evidence, keep: int, params: FilterParams) -> torch.Tensor:
        scores = window_probabilities(
            evidence.queries, evidence.keys, scale=evidence.scale, softcap=evidence.softcap
        )
        protected = protected_positions(evidence.protected, evidence.num_tokens, keep)
        order = self._order(scores)
        # protected positions go first, in their own order
        is_free = torch.ones(evidence.num_tokens, dtype=torch.bool, device=scores.device)
        first = torch.tensor(protected, dtype=torch.long, device=scores.device)
        is_free[first] = False
        kept = torch.cat([first, order[is_free[order]]])[:keep]
        return kept.sort().values

    def _order(self, scores: torch.Tensor) -> torch.Tensor:
        """All positions, best first: by chunk rank (with margins), then by score within a chunk."""
        num_tokens = scores.shape[0]
        num_chunks = -(-num_tokens // self.chunk)
        padded = torch.nn.functional.pad(scores, (0, num_chunks * self.chunk - num_tokens))
        best = padded.view(num_chunks, self.chunk).amax(dim=1)
        rank = torch.empty(num_chunks, dtype=torch.long, device=scores.device)
        rank[best.sort(descending=True, stable=True).indices] = torch.arange(
            num_chunks, device=scores.device
        )
        positions = torch.arange(num_tokens, device=scores.device)
        mine = rank[positions // self.chunk]
        for shift in (-self.margin, self.margin):  # the rank of a chunk whose margin reaches here
            neighbour = (positions + shift).clamp(0, num_tokens - 1) // self.chunk
            mine = torch.minimum(mine, rank[neighbour])
        by_score = scores.sort(descending=True, stable=True).indices
        return by_score[mine[by_score].sort(stable=True).indices]
