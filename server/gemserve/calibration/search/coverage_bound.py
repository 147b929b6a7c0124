"""Chooses the coverage below which a choice of the filter is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.head_search import (
    Head,
    Observation,
    ProbeObservations,
    coverage,
    recall_of,
    segment_coverage,
)
from gemserve.calibration.search.result import LayerResult, Trust, rounded_mean

# At most this share of the choices that found the fact may be below the bound. The bound is then
# lowered a little, because attention spreads thinner over documents longer than the probes.
_FALSE_ALARMS = 0.05
BOUND_MARGIN = 0.9
FOUND = 0.8  # recall of a choice that has found the fact

Coverage = Callable[[Sequence[Head], Observation, bool], float]


def judge_coverage(
    row: LayerResult, probes: Sequence[ProbeObservations], others: Sequence[ProbeObservations]
) -> Trust:
    """Choose the bounds on `probes` and measure on `others` how often they err."""

    def judge(measure: Coverage, most: float) -> tuple[float, tuple[float | None, ...]]:
        def of(observations: Sequence[Observation]) -> list[float]:
            return [measure(row.heads, each, row.ends_with) for each in observations]

        nothing = [each for probe in probes for each in (probe.absent, probe.diffuse)]
        found = of(_facts(row, probes, is_found=True))
        bound = min(most, BOUND_MARGIN * choose_bound(found, of(nothing)))
        judged = (
            _facts(row, others, is_found=True),
            _facts(row, others, is_found=False),
            [probe.absent for probe in others],
            [probe.diffuse for probe in others],
        )
        return round(bound, 4), tuple(_share_below(bound, of(each)) for each in judged)

    bound, (found, missed, absent, diffuse) = judge(coverage, 1.0)
    # facts among other text stand out more than answers in documents of their own subject
    window_bound, of_segments = judge(segment_coverage, Calibration.USUAL_SEGMENT_BOUND)
    return Trust(
        bound=bound,
        window_bound=window_bound,
        found=found,
        missed=missed,
        absent=absent,
        diffuse=diffuse,
        window_found=of_segments[0],
        window_missed=of_segments[1],
        window_absent=of_segments[2],
        window_diffuse=of_segments[3],
    )


def _facts(
    row: LayerResult, probes: Sequence[ProbeObservations], *, is_found: bool
) -> list[Observation]:
    """The questions whose facts these heads find, or those whose they miss."""
    facts = [fact for probe in probes for fact in probe.facts if len(fact.gold)]
    return [f for f in facts if (recall_of(row.heads, f, row.ends_with) >= FOUND) == is_found]


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
