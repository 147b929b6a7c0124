"""One scale for the tokens of segments that were read apart.

All segments' logits of a row and head go under one softmax, with one sink: the mean of the
segments' sinks. So a row that looks everywhere counts little, and a segment without an answer has
no winner. Of each segment its sums are kept, and the best logits of each row. The softmax over the
segments is that of Star Attention (Acharya et al., 2024), and the sinks are those of StreamingLLM
(Xiao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gemserve.contract.filter_plan import SummaryArrays

# Logits of each row, head and segment that are kept. Four of 1,000 tokens choose as all do.
MOST_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSummary:
    """What is kept of one segment's attention; all float32, and `places` int64.

    `sinks`, `keys`: log-sum-exps of the anchor's logits and of the segment's, [rows], where the
    rows of all heads are in a row. `best`: the highest logits, [rows, kept], of the prompt's tokens
    `places`. `shares`: the largest share of a row's attention within this segment that each of its
    tokens gets, by the question's own rows and by all: [2, tokens].
    """

    sinks: torch.Tensor
    keys: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor

    def as_arrays(self, start: int) -> SummaryArrays:
        """The same for another engine. `start`: of the segment."""
        return SummaryArrays(
            sinks=self.sinks.cpu().numpy(),
            keys=self.keys.cpu().numpy(),
            best=self.best.cpu().numpy(),
            places=(self.places - start).cpu().numpy().astype(np.int32),
            shares=self.shares.cpu().numpy(),
        )

    @staticmethod
    def of_arrays(arrays: SummaryArrays, start: int, device: torch.device) -> SegmentSummary:
        """What another engine has read of the segment that begins at `start`."""
        return SegmentSummary(
            sinks=torch.tensor(arrays.sinks, device=device),
            keys=torch.tensor(arrays.keys, device=device),
            best=torch.tensor(arrays.best, device=device),
            places=torch.tensor(arrays.places, device=device).long() + start,
            shares=torch.tensor(arrays.shares, device=device),
        )


def pooled_scores(segments: Sequence[SegmentSummary], num_tokens: int) -> torch.Tensor:
    """The largest share of the attention to all segments that a row pays to each token.

    [num_tokens], float32; 0 for tokens that are not among any row's best.
    """
    sums = torch.stack([segment.keys for segment in segments]).logsumexp(0)
    sinks = torch.stack([segment.sinks for segment in segments]).mean(0)
    total = torch.logaddexp(sums, sinks)[:, None]
    scores = torch.zeros(num_tokens, device=total.device)
    for segment in segments:
        shares = (segment.best - total).exp().flatten()
        scores.scatter_reduce_(0, segment.places.flatten(), shares, "amax")
    return scores
