"""Turns a choice's scores into what a reply shows of them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gemserve.filter_plan import Budget
from gemserve.filtering.passages import number_passages, rank_passages
from gemserve.filtering.protected_budget import reserve
from gemserve.filtering.selector import Evidence, Selector
from gemserve.filtering.sieve import Sieve
from gemserve.scores import (
    MOST_HEAD_SCORES,
    MOST_HEADS,
    MOST_PASSAGES,
    FilterScores,
    HeadScores,
    SelectionInputs,
)
from gemserve.types import FilterParams


def report_scores(
    scores: torch.Tensor,
    selector: Selector,
    evidence: Evidence,
    budget: Budget,
    params: FilterParams,
    whole_ratio: float,
) -> FilterScores:
    """The report of `scores` [tokens], float32, which `selector` chose by."""
    is_exact = params.return_scores in ("exact", "heads")
    low, high = float(scores.min()), float(scores.max())
    values = scores.cpu().numpy()
    tokens = values.astype("<f4") if is_exact else strengths(values, low, high)
    passages: tuple[tuple[int, int, int], ...] = ()
    inputs = None
    heads, heads_high = tuple[HeadScores, ...](), 0.0
    if isinstance(selector, Sieve):
        passages = _passages(scores, selector, evidence, budget)
        inputs = _inputs(evidence, budget, params) if is_exact else None
        if params.return_scores == "heads":
            heads, heads_high = _heads(selector, evidence)
    return FilterScores(
        dtype="float32" if is_exact else "uint8",
        tokens=b64encode(tokens.tobytes()).decode(),
        low=low,
        high=high,
        passages=passages,
        whole_ratio=round(whole_ratio, 4),
        inputs=inputs,
        heads=heads,
        heads_high=heads_high,
    )


def strengths(values: npt.NDArray[np.float32], low: float, high: float) -> npt.NDArray[np.uint8]:
    """255·√share of each value, where share is its place between `low` and `high`, 0 to 1.

    The root leaves differences among small shares visible: most attention is close to 0.
    """
    if high <= low:
        return np.zeros(len(values), dtype=np.uint8)
    share = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1)
    return np.rint(255 * np.sqrt(share)).astype(np.uint8)


def _passages(
    scores: torch.Tensor, sieve: Sieve, evidence: Evidence, budget: Budget
) -> tuple[tuple[int, int, int], ...]:
    """The passages of this budget with their strengths: see `FilterScores`."""
    num_tokens = evidence.num_tokens
    reserved = reserve(evidence.protected, num_tokens, budget.high, budget.low)
    scores = scores.clone()
    scores[reserved.firm] = 0
    limit = sieve.passage_limit(budget.high - len(reserved.positions))
    numbers = number_passages(num_tokens, evidence.breaks, limit)
    ranks = rank_passages(scores, torch.from_numpy(numbers).to(scores.device)).cpu().numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    stops = np.append(starts[1:], num_tokens)
    is_passage = numbers[starts] > 0
    starts, stops = starts[is_passage], stops[is_passage]
    if len(starts) == 0:
        return ()
    of_passages = ranks[starts]
    codes = strengths(of_passages, 0.0, float(of_passages.max()))
    best = np.sort(np.argsort(-of_passages, kind="stable")[:MOST_PASSAGES])
    rows = zip(starts[best].tolist(), stops[best].tolist(), codes[best].tolist(), strict=True)
    return tuple(rows)


def _heads(sieve: Sieve, evidence: Evidence) -> tuple[tuple[HeadScores, ...], float]:
    """The scores of the heads, and the highest of them: see `FilterScores`."""
    layer = max(evidence.layers)
    counting = evidence.heads
    if counting is None:
        counting = tuple((layer, head) for head in range(len(evidence.layers[layer].queries)))
    every = [(i, head) for i, each in evidence.layers.items() for head in range(len(each.queries))]
    named = [*counting, *(head for head in every if head not in counting)]
    named = named[: min(MOST_HEADS, MOST_HEAD_SCORES // evidence.num_tokens)]
    scores = [sieve.score_of_heads(evidence, [head]).cpu().numpy() for head in named]
    high = max((float(of_head.max()) for of_head in scores), default=0.0)
    heads = tuple(
        HeadScores(
            layer=index,
            head=head,
            counts=(index, head) in counting,
            tokens=b64encode(strengths(of_head, 0.0, high).tobytes()).decode(),
        )
        for (index, head), of_head in zip(named, scores, strict=True)
    )
    return heads, high


def _inputs(evidence: Evidence, budget: Budget, params: FilterParams) -> SelectionInputs:
    breaks = evidence.breaks
    return SelectionInputs(
        protected=tuple((p.start, p.stop, int(p.priority)) for p in evidence.protected),
        paragraphs=_positions(breaks.paragraphs),
        sentences=_positions(breaks.sentences),
        lines=_positions(breaks.lines),
        coverage_bound=evidence.coverage_bound,
        fallback=params.fallback,
        limit=budget.limit,
    )


def _positions(positions: Sequence[int]) -> str:
    return b64encode(np.array(positions, dtype="<u4").tobytes()).decode()
