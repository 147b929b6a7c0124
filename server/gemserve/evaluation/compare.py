"""Paired comparison of methods: the same examples, the difference of their scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gemserve.evaluation.score import Outcome

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`method` minus `other`, pooled over all examples both have answered.

    `low`, `high`: 95% interval (bootstrap over examples). `worst`: the smallest difference of any
    subtask and length, `worst_cell`.
    """

    method: str
    other: str
    difference: float
    low: float
    high: float
    worst: float
    worst_cell: tuple[str, int]
    n: int


def compare(outcomes: Iterable[Outcome], method: str, other: str) -> Comparison:
    """Raises `ValueError` if the two share no example."""
    scores: dict[tuple[str, int, int], dict[str, float]] = {}
    for o in outcomes:
        scores.setdefault((o.subtask, o.prompt_tokens, o.index), {})[o.method] = o.score
    cells: dict[tuple[str, int], list[float]] = {}
    for (subtask, length, _), seen in scores.items():
        if method in seen and other in seen:
            cells.setdefault((subtask, length), []).append(seen[method] - seen[other])
    if not cells:
        raise ValueError(f"no example has both {method} and {other}")
    pooled = np.array([d for differences in cells.values() for d in differences])
    draws = np.random.default_rng(0).integers(0, len(pooled), (_RESAMPLES, len(pooled)))
    low, high = np.percentile(pooled[draws].mean(axis=1), [2.5, 97.5])
    means = {cell: float(np.mean(differences)) for cell, differences in cells.items()}
    worst_cell = min(means, key=lambda cell: means[cell])
    return Comparison(
        method=method,
        other=other,
        difference=float(pooled.mean()),
        low=float(low),
        high=float(high),
        worst=means[worst_cell],
        worst_cell=worst_cell,
        n=len(pooled),
    )
