"""Tells two samples apart by their ranks (Mann and Whitney), with the normal approximation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The share of pairs in which the first sample is below the second, and the two-sided p-value.

    Equal values count half. The p-value is corrected for them and for continuity. It is good for
    samples of ten and more.
    """
    sizes = len(first), len(second)
    marked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    rank, sum_of_first, ties = 0, 0.0, 0
    for _, group in groupby(marked, key=lambda item: item[0]):
        members = [sample for _, sample in group]
        middle = rank + (len(members) + 1) / 2  # equal values share their ranks' mean
        sum_of_first += middle * members.count(0)
        rank += len(members)
        ties += len(members) ** 3 - len(members)
    pairs, total = sizes[0] * sizes[1], sum(sizes)
    above = sum_of_first - sizes[0] * (sizes[0] + 1) / 2
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    distance = max(0.0, abs(above - pairs / 2) - 0.5)
    p_value = math.erfc(distance / math.sqrt(2 * variance)) if variance > 0 else 1.0
    return 1 - above / pairs, p_value
