"""Chooses the coverage below which a choice of the filter is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from gemserve.calibration.search.head_search import (
    ProbeObservations,
    coverage,
    recall_of,
)
from gemserve.calibration.search.result import LayerResult, Trust, rounded_mean

# At most this share of the choices that found the fact may be below the bound. The bound is then
# lowered a little, because attention spreads thinner over documents longer than the probes.
_FALSE_ALARMS = 0.05
BOUND_MARGIN = 0.9


def judge_coverage(
    row: LayerResult,
    observations: Sequence[ProbeObservations],
    others: Sequence[ProbeObservations],
) -> Trust:
    """Choose the bound on `observations` and measure on `others` how often it errs."""

    def coverages(probes: Sequence[ProbeObservations], question: int) -> list[float]:
        return [coverage(row.heads, probe[question], row.ends_with) for probe in probes]

    def successes(probes: Sequence[ProbeObservations]) -> list[ProbeObservations]:
        return [p for p in probes if recall_of(row.heads, p[0], row.ends_with) >= 0.8]

    good = coverages(successes(observations), 0)
    bad = [*coverages(observations, 1), *coverages(observations, 2)]
    bound = round(BOUND_MARGIN * choose_bound(good, bad), 4)
    judged = successes(others)
    return Trust(
        bound=bound,
        found=_share_below(bound, coverages(judged, 0)),
        absent=_share_below(bound, coverages(others, 1)),
        diffuse=_share_below(bound, coverages(others, 2)),
    )


def _share_below(bound: float, values: Sequence[float]) -> float | None:
    return rounded_mean([float(c < bound) for c in values]) if values else None


def choose_bound(good: Sequence[float], bad: Sequence[float]) -> float:
    """The bound that best separates good from bad choices, with few false alarms."""
    most = _FALSE_ALARMS * len(good)
    allowed = [b for b in (0.0, *sorted(good), *sorted(bad)) if sum(g < b for g in good) <= most]

    def gain(bound: float) -> float:
        missed = sum(b < bound for b in bad) / max(1, len(bad))
        return missed - sum(g < bound for g in good) / max(1, len(good))

    best: float = max(allowed, key=gain)
    return round(best, 4)
