"""One scale for the tokens of windows that were read apart.

All windows' logits of a row and head go under one softmax, with one sink: the mean of the windows'
sinks. So a row that looks everywhere counts little, and a window without an answer has no winner.
Of each window its sums are kept, and the best logits of each row. The softmax over the windows is
that of Star Attention (Acharya et al., 2024), and the sinks are those of StreamingLLM (Xiao et al.,
2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gemserve.contract.filter_plan import SummaryArrays

# Logits of each row, head and window that are kept. Four of 1,000 tokens choose as all do.
MOST_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSummary:
    """What is kept of one window's attention; all float32, and `places` int64.

    `sinks`, `keys`: log-sum-exps of the anchor's logits and of the window's, [rows], where the rows
    of all heads are in a row. `best`: the highest logits, [rows, kept], of the prompt's tokens
    `places`. `shares`: the largest share of a row's attention within this window that each of its
    tokens gets, by the question's own rows and by all: [2, tokens].
    """

    sinks: torch.Tensor
    keys: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor

    def as_arrays(self, start: int) -> SummaryArrays:
        """The same for another engine. `start`: of the window."""
        return SummaryArrays(
            sinks=self.sinks.cpu().numpy(),
            keys=self.keys.cpu().numpy(),
            best=self.best.cpu().numpy(),
            places=(self.places - start).cpu().numpy().astype(np.int32),
            shares=self.shares.cpu().numpy(),
        )

    @staticmethod
    def of_arrays(arrays: SummaryArrays, start: int, device: torch.device) -> WindowSummary:
        """What another engine has read of the window that begins at `start`."""
        return WindowSummary(
            sinks=torch.tensor(arrays.sinks, device=device),
            keys=torch.tensor(arrays.keys, device=device),
            best=torch.tensor(arrays.best, device=device),
            places=torch.tensor(arrays.places, device=device).long() + start,
            shares=torch.tensor(arrays.shares, device=device),
        )


def pooled_scores(windows: Sequence[WindowSummary], num_tokens: int) -> torch.Tensor:
    """The largest share of the attention to all windows that a row pays to each token.

    [num_tokens], float32; 0 for tokens that are not among any row's best.
    """
    sums = torch.stack([window.keys for window in windows]).logsumexp(0)
    sinks = torch.stack([window.sinks for window in windows]).mean(0)
    total = torch.logaddexp(sums, sinks)[:, None]
    scores = torch.zeros(num_tokens, device=total.device)
    for window in windows:
        shares = (window.best - total).exp().flatten()
        scores.scatter_reduce_(0, window.places.flatten(), shares, "amax")
    return scores
