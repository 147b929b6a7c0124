"""Compares methods in pairs: the difference of their scores on the same examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gemserve_lab.run import Outcome

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`method` minus `other`, pooled over all examples that both have answered.

    `low`, `high`: 95% interval (bootstrap over examples). `worst`: the smallest difference of any
    subtask and length, which `worst_cell` names.
    """

    method: str
    other: str
    difference: float
    low: float
    high: float
    worst: float
    worst_cell: tuple[str, int]
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackVerdict:
    """How often a method's fallback ran where it was needed, and where it was not.

    Answers without the fallback decide. `needed`: the whole prompt's answer is right, the method's
    is not. `idle`: the method's answer is right.
    """

    needed: int
    needed_fired: int
    idle: int
    idle_fired: int


def judge_fallback(outcomes: Iterable[Outcome], method: str) -> FallbackVerdict:
    """Judge the outcomes of `none`, `method` and `method:fallback` on the same examples."""
    with_fallback = f"{method}:fallback"
    by_example: dict[tuple[str, int, int, int], dict[str, Outcome]] = {}
    for o in outcomes:
        by_example.setdefault((o.subtask, o.prompt_tokens, o.samples, o.index), {})[o.method] = o
    fired: dict[bool, list[bool]] = {True: [], False: []}
    for by_method in by_example.values():
        if not {"none", method, with_fallback} <= set(by_method):
            continue
        has_fired = by_method[with_fallback].reason in ("widened", "diffuse_attention")
        if by_method[method].score == 1:
            fired[False].append(has_fired)
        elif by_method["none"].score == 1:
            fired[True].append(has_fired)
    return FallbackVerdict(
        needed=len(fired[True]),
        needed_fired=sum(fired[True]),
        idle=len(fired[False]),
        idle_fired=sum(fired[False]),
    )


def compare(outcomes: Iterable[Outcome], method: str, other: str) -> Comparison:
    """Compare two methods. Raises `ValueError` if they share no example."""
    scores: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for o in outcomes:
        scores.setdefault((o.subtask, o.prompt_tokens, o.samples, o.index), {})[o.method] = o.score
    cells: dict[tuple[str, int], list[float]] = {}
    for (subtask, length, _, _), by_method in scores.items():
        if method in by_method and other in by_method:
            cells.setdefault((subtask, length), []).append(by_method[method] - by_method[other])
    if not cells:
        raise ValueError(f"no example has both {method} and {other}")
    pooled = np.array([d for differences in cells.values() for d in differences])
    rng = np.random.default_rng(0)
    resampled = [rng.choice(pooled, len(pooled)).mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5])
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
