"""The test that tells two samples of times apart: what is known of it comes out."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from benchmarks.robustness.cache_timing import mann_whitney


def exact_p(first: list[float], second: list[float]) -> float:
    """By all ways to deal the values out, without ranks."""
    values = first + second
    middle = len(first) * len(second) / 2

    def distance(chosen: tuple[int, ...]) -> float:
        ones = [values[i] for i in chosen]
        others = [v for i, v in enumerate(values) if i not in chosen]
        return abs(sum((x > y) + (x == y) / 2 for x in ones for y in others) - middle)

    observed = distance(tuple(range(len(first))))
    all_ways = list(combinations(range(len(values)), len(first)))
    return sum(distance(way) >= observed for way in all_ways) / len(all_ways)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_ties", [False, True])
def test_it_comes_near_the_exact_test(seed: int, has_ties: bool) -> None:
    rng = Random(seed)
    values = [rng.gauss(0.3 * (i < 8), 1) for i in range(15)]
    if has_ties:
        values = [round(2 * value) / 2 for value in values]
    first, second = values[:8], values[8:]
    assert mann_whitney(first, second)[1] == pytest.approx(exact_p(first, second), abs=0.03)


def test_samples_apart_and_samples_alike() -> None:
    """A p-value of 1 for everything would let any leak pass."""
    low, high = [float(i) for i in range(50)], [100.0 + i for i in range(50)]
    share, p_value = mann_whitney(low, high)
    assert share == 1.0
    assert p_value < 1e-12
    assert mann_whitney(high, low)[0] == 0.0
    assert mann_whitney(low, low) == (0.5, 1.0)
    assert mann_whitney([1.0] * 20, [1.0] * 20) == (0.5, 1.0)
