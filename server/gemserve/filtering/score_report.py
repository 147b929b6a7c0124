"""Turns a choice's scores into what a reply shows of them."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
import numpy.typing as npt
import torch

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.scores import FilterScores
from gemserve.filtering.selector import PromptEvidence, Selector


def report_scores(
    scores: torch.Tensor,
    selector: Selector,
    evidence: PromptEvidence,
    budget: Budget,
    params: FilterParams,
    whole_ratio: float,
) -> FilterScores:
    """The report of `scores` [tokens], float32, which `selector` chose by."""
    is_exact = params.return_scores in ("exact", "heads")
    low, high = float(scores.min()), float(scores.max())
    values = scores.cpu().numpy()
    tokens = values.astype("<f4") if is_exact else strengths(values, low, high)
    details = selector.details(scores, evidence, budget, params)
    return FilterScores(
        dtype="float32" if is_exact else "uint8",
        tokens=b64encode(tokens.tobytes()).decode(),
        low=low,
        high=high,
        passages=details.passages,
        whole_ratio=round(whole_ratio, 4),
        inputs=details.inputs,
        heads=details.heads,
        heads_high=details.heads_high,
    )


def strengths(values: npt.NDArray[np.float32], low: float, high: float) -> npt.NDArray[np.uint8]:
    """255·√share of each value, where share is its place between `low` and `high`, 0 to 1.

    The root leaves differences among small shares visible: most attention is close to 0.
    """
    if high <= low:
        return np.zeros(len(values), dtype=np.uint8)
    share = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1)
    return np.rint(255 * np.sqrt(share)).astype(np.uint8)
