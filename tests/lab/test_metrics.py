"""Metrics, against values worked out by hand."""

from __future__ import annotations

import sys

import pytest

from gemserve.calibration.search.example import Example
from gemserve.prompting.prompt import Prompt
from gemserve_lab.metrics import METRICS, score_answer

LABELS = ("city", "capital city", "country", "person")


def score(
    metric: str,
    text: str,
    *answers: str,
    labels: tuple[str, ...] = (),
    is_one_line: bool = False,
) -> float:
    example = Example(
        subtask="a",
        num_tokens=1,
        index=0,
        prompt=Prompt([0], ()),
        question="",
        answers=answers,
        metric=metric,
        labels=labels,
        is_one_line=is_one_line,
    )
    return score_answer(text, example)


F1 = [
    ("The Eiffel tower!", ("Eiffel Tower",), 1.0),
    ("tower of Eiffel", ("Eiffel Tower",), 4 / 5),  # 2 of 3 right, 2 of 2 found
    ("in Paris", ("London",), 0.0),
    ("Paris", ("London", "Paris, France", "paris"), 1.0),
    ("to be or not", ("to be to be",), 4 / 8),  # a word counts as often as both have it
    ("it's", ("its",), 1.0),
    ("well-known", ("well known",), 0.0),  # punctuation goes, it does not become a space
    ("anthem", ("them",), 0.0),  # articles are whole words
    ("", ("Paris",), 0.0),
    ("the.", ("A",), 1.0),  # nothing is left of either
    ("the", ("B",), 0.0),
    ("  two\n\twords ", ("words two",), 1.0),
]


@pytest.mark.parametrize(("text", "answers", "expected"), F1)
def test_f1_is_of_words_without_case_punctuation_and_articles(
    text: str, answers: tuple[str, ...], expected: float
) -> None:
    assert score("f1", text, *answers) == pytest.approx(expected)


CONTAINS = [
    ("The code for the lantern is 48213.", ("48213",), 1.0),
    ("48213", ("482",), 0.0),  # not within a longer number
    ("1482", ("482",), 0.0),
    ("4.82", ("82",), 0.0),
    ("1,482 and 482,100", ("482",), 0.0),
    ("at 17:40:30", ("7:40",), 0.0),
    ("at 7:405", ("7:40",), 0.0),
    ("at 7:40.", ("7:40",), 1.0),
    ("$482, or 12.", ("482",), 1.0),
    ("12, 482, 7", ("482", "7"), 1.0),
    ("12,4821,7", ("4821",), 1.0),  # a list, no thousands
    ("12, 482", ("482", "7"), 0.0),  # all of them are expected
    ("In the BOAT\n  house", ("boat house",), 1.0),
    ("the boathouses", ("boathouse",), 0.0),
    ("its (rusty) cables", ("(rusty)",), 1.0),
    ("a.c", ("abc",), 0.0),
    ("", ("x",), 0.0),
]


@pytest.mark.parametrize(("text", "answers", "expected"), CONTAINS)
def test_contains_finds_whole_answers_anywhere(
    text: str, answers: tuple[str, ...], expected: float
) -> None:
    assert score("contains", text, *answers) == expected


ROUGE = [
    ("the cat sat", "the cat sat", 1.0),
    ("the cat sat", "the dog sat", 2 / 3),
    ("sat cat the", "the cat sat", 1 / 3),  # order counts
    ("a b. c d", "c d. a b", 1.0),  # but not that of sentences
    ("a b c d", "a b", 2 * (1 / 2) * 1 / (3 / 2)),
    ("a a a a", "a", 1.0),  # each word once
    ("Cat", "cat", 0.0),
    ("cat,", "cat", 0.0),
    ("", "cat", 0.0),
    ("...", "cat", 0.0),
    (" ", "cat", 0.0),
    ("cat", ".", 0.0),
]


@pytest.mark.parametrize(("text", "answer", "expected"), ROUGE)
def test_rouge_l_is_of_sentences(text: str, answer: str, expected: float) -> None:
    assert score("rouge_l", text, answer) == pytest.approx(expected, abs=1e-6)


def test_rouge_l_of_sentences_longer_than_the_recursion_limit() -> None:
    """The library walks a sentence by recursion, and a text may have no full stop."""
    limit = sys.getrecursionlimit()
    words = " ".join(f"w{i}" for i in range(limit + 10))
    assert score("rouge_l", words, "other", "w7 w9") > 0
    assert score("rouge_l", "x", words) == 0
    assert sys.getrecursionlimit() == limit


CLASSIFICATION = [
    ("It is a country.", "country", 1.0),
    ("a country or a person", "country", 1 / 2),
    ("a person", "country", 0.0),
    ("the capital city", "capital city", 1.0),  # "city" within it is not another label
    ("the capital city", "city", 1 / 2),
    ("Country", "country", 0.0),
    ("", "country", 0.0),
    ("country\nperson", "country", 1 / 2),
]


@pytest.mark.parametrize(("text", "answer", "expected"), CLASSIFICATION)
def test_classification_counts_labels_named(text: str, answer: str, expected: float) -> None:
    assert score("classification", text, answer, labels=LABELS) == expected


NUMBER = [
    ("Paragraph 7", ("Paragraph 7",), 1.0),
    ("7 or 8", ("Paragraph 7",), 1 / 2),
    ("Paragraph 17", ("Paragraph 7",), 0.0),
    ("7, 7 and 3", ("7",), 2 / 3),
    ("07", ("7",), 0.0),
    ("seven", ("7",), 0.0),
    ("12", ("7", "12"), 1.0),
]


@pytest.mark.parametrize(("text", "answers", "expected"), NUMBER)
def test_number_is_the_share_of_the_right_one(
    text: str, answers: tuple[str, ...], expected: float
) -> None:
    assert score("number", text, *answers) == pytest.approx(expected)


CODE = [
    ("return x", "return x", 1.0),
    ("\n\nreturn x\nreturn y", "return x", 1.0),
    ("```python\n# a comment\n// another\nreturn x", "return x", 1.0),
    ("return y", "return x", 0.88),  # 14 of 16 characters
    ("abc", "xyz", 0.0),
    ("", "return x", 0.0),
    ("# only a comment", "return x", 0.0),
    ("# a comment\n\nreturn x", "return x", 0.0),  # the blank line is the first that is code
]


@pytest.mark.parametrize(("text", "answer", "expected"), CODE)
def test_code_similarity_is_of_the_first_line_of_code(
    text: str, answer: str, expected: float
) -> None:
    assert score("code_similarity", text, answer) == pytest.approx(expected)


def test_items_are_all_expected() -> None:
    assert score("items", " b, a.", "a", "b") == 1
    assert score("items", "a", "a", "b") == 0


CONTAINS = [
    ("The code for the lantern is 48213.", ("48213",), 1),
    ("It is 148213.", ("48213",), 0),
    ("It is 482130", ("48213",), 0),
    ("It is 48213.5", ("48213",), 0),
    ("It is 0.48213", ("48213",), 0),
    ("since version 3.9, or 3.10", ("3.1",), 0),
    ("since version 3.9.", ("3.9",), 1),
    ("returns -1.", ("-1",), 1),
    ("returns -10", ("-1",), 0),
    ("the GNU\n  c library", ("GNU C Library",), 1),
    ("a, then b", ("b", "a"), 1),
    ("a", ("a", "b"), 0),
    ("", ("a",), 0),
    ("what (x|y)*?", ("(X|Y)*",), 1),
]


@pytest.mark.parametrize(("text", "answers", "expected"), CONTAINS)
def test_every_answer_stands_in_a_sentence(
    text: str, answers: tuple[str, ...], expected: int
) -> None:
    """A right answer in a whole sentence counts; a number within another one does not."""
    assert score("contains", text, *answers) == expected


def test_only_the_first_line_counts_where_that_is_said() -> None:
    text = "\n\nParis\nQuestion: and then?"
    assert score("f1", text, "Paris", is_one_line=True) == 1
    assert score("f1", text, "Paris") == pytest.approx(2 / 5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("text", ["", " ", "\n", ".", "7", "a,b", "x" * 3000, "\ud800", "中文。"])
def test_no_answer_breaks_a_metric(metric: str, text: str) -> None:
    assert 0 <= score(metric, text, "Paragraph 7", "8", labels=("Paragraph 7", "8")) <= 1
