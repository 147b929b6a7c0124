"""Rules that score an answer to a chat against the expected one, from 0 (wrong) to 1 (right)."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence

Rule = Callable[[str, str], float]


def exact(answer: str, expected: str) -> float:
    """1 if the answer is the expected one; white space around it does not count."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 if the expected words are in the answer, whatever else it says. Case does not count."""
    wanted = re.escape(" ".join(expected.casefold().split()))
    given = " ".join(answer.casefold().split())
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", given) is not None)


def same_json(answer: str, expected: str) -> float:
    """1 if both are JSON of the same value; order of fields and white space do not count."""
    try:
        return float(json.loads(answer) == json.loads(expected))
    except (ValueError, RecursionError):
        return 0.0


def same_fields(answer: str, expected: str) -> float:
    """The share of the expected object's fields that the answer has with the same value."""
    try:
        given, wanted = json.loads(answer), json.loads(expected)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(given, dict) or not isinstance(wanted, dict) or not wanted:
        return float(given == wanted)
    return sum(name in given and given[name] == wanted[name] for name in wanted) / len(wanted)


def matching(pattern: str) -> Rule:
    """A rule that gives 1 if the whole answer matches a regular expression."""
    compiled = re.compile(pattern)
    return lambda answer, _: float(compiled.fullmatch(answer.strip()) is not None)


RULES: dict[str, Rule] = {
    "exact": exact,
    "contains": contains,
    "json": same_json,
    "fields": same_fields,
}


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's interval (95%) of a mean of scores from 0 to 1.

    Scores between 0 and 1 vary less than it assumes, so that it is too wide for them.
    """
    n, z = len(scores), 1.96
    share = statistics.fmean(scores)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The mean difference of scores of the same questions, and its interval (95%)."""
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(gaps)
    half = 1.96 * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 1.0
    return mean, mean - half, mean + half
