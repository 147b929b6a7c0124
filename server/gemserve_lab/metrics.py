"""Scores an answer against the expected answers, from 0 (wrong) to 1 (right).

If there are several right answers, the one that fits best counts. All metrics but `contains` and
`items` are LongBench's, so their scores can be compared with published ones.
"""

from __future__ import annotations

import importlib.util
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable

from gemserve.calibration.search.example import Example, contains
from gemserve.errors import ConfigError
from gemserve_lab.tasks.example_file import ExampleFile, find_numbers

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_COMMENT_SIGNS = ("`", "#", "//")


def score_answer(text: str, example: Example) -> float:
    """The example's metric, applied to the first line of the answer if only that counts."""
    if example.is_one_line:
        text = text.lstrip("\n").split("\n", 1)[0]
    return METRICS[example.metric](text, example)


def items(text: str, example: Example) -> float:
    """1 if the answer lists exactly the expected items in any order, and nothing else."""
    given = text.strip().removesuffix(".").split(",")
    return float(sorted(item.strip() for item in given) == sorted(example.answers))


def f1(text: str, example: Example) -> float:
    """F1 score over words: the harmonic mean of precision and recall.

    Case, punctuation, articles and order do not count. An answer that is empty after this matches
    only another empty one, as in SQuAD.
    """
    return max(_f1(_words(text), _words(answer)) for answer in example.answers)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(given: list[str], expected: list[str]) -> float:
    if not given or not expected:
        return float(given == expected)
    common = (Counter(given) & Counter(expected)).total()
    return 2 * common / (len(given) + len(expected))


def rouge_l(text: str, example: Example) -> float:
    """ROUGE-L over sentences of distinct words, as the package `rouge` counts it.

    Words keep their case and punctuation. Full stops end sentences, even within numbers.
    """
    return max(_rouge_l(text, answer) for answer in example.answers)


def _rouge_l(given: str, expected: str) -> float:
    from rouge import Rouge

    # the package raises an error if no sentence is left
    if not given.strip(".") or not expected.strip("."):
        return 0.0
    before = sys.getrecursionlimit()
    # the package recurses once for each word of two sentences
    sys.setrecursionlimit(before + len(given.split()) + len(expected.split()))
    try:
        scores = Rouge(metrics=["rouge-l"]).get_scores(given, expected)
    finally:
        sys.setrecursionlimit(before)
    return float(scores[0]["rouge-l"]["f"])


def classification(text: str, example: Example) -> float:
    """1 if the right label is named; 1/n if n labels are named.

    A label within the right one, such as "city" in "capital city", is not counted as named.
    """
    return max(_classification(text, label, example.labels) for label in example.answers)


def _classification(text: str, expected: str, labels: tuple[str, ...]) -> float:
    named = [x for x in labels if x in text and (x == expected or x not in expected)]
    return 1 / len(named) if expected in named else 0.0


def number(text: str, example: Example) -> float:
    """The share of the numbers in the answer that are the expected one."""
    given = find_numbers(text)
    if not given:
        return 0.0
    return max(given.count(find_numbers(answer)[0]) / len(given) for answer in example.answers)


def code_similarity(text: str, example: Example) -> float:
    """1 − (insertions and deletions) / (characters of both), for the first line of code.

    A line with a comment sign or a backquote is not code. The result is rounded to hundredths.
    """
    from rapidfuzz import fuzz

    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(sign in x for sign in _COMMENT_SIGNS)), "")
    return max(round(fuzz.ratio(line, answer)) / 100 for answer in example.answers)


METRICS: dict[str, Callable[[str, Example], float]] = {
    "contains": contains,
    "items": items,
    "f1": f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "number": number,
    "code_similarity": code_similarity,
}
# The packages of the `eval` extra that some metrics need.
PACKAGES: dict[str, str] = {"rouge_l": "rouge", "code_similarity": "rapidfuzz"}


def check_packages(files: Iterable[ExampleFile]) -> None:
    """Raise `ConfigError` if the library that a file's metric needs is not installed."""
    for metric in sorted({case.metric for file in files for case in file.cases.values()}):
        package = PACKAGES.get(metric)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"metric={metric}: needs {package}, as in pip install 'gemserve[eval]'"
            )
