"""Tasks for filters that read a document in parts: where the facts are, and what they share."""

from __future__ import annotations

import re
from itertools import combinations
from random import Random
from typing import Any

import pytest

from gemserve.calibration.search.example import Example, ExampleDraw, contains, recall
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.natural_facts import VOCABULARIES
from gemserve.synthetic.words_near_misses import NEAR_MISSES
from gemserve_lab.tasks.haystack import Placed
from gemserve_lab.tasks.linked import MOST_DEFINITIONS, draw_definitions, draw_pair
from gemserve_lab.tasks.natural import draw_natural, draw_near_misses
from gemserve_lab.tasks.registry import TASKS
from gemserve_lab.tasks.words_linked import (
    COMPANIES,
    DEFINITIONS,
    DUTIES,
    LINKS,
    TERMS,
    THINGS,
)

NAMES = ("near_misses", "pairs", "far_definition")


def make(tokenizer: Any, name: str, num_tokens: int = 2048, index: int = 1) -> Example:
    draw = ExampleDraw(seed=3, num_tokens=num_tokens, index=index, samples=4)
    return TASKS["needle"][name](tokenizer, draw)


def has(text: str, answer: str) -> bool:
    example = Example(
        subtask="a", num_tokens=1, index=0, prompt=Prompt([0], ()), question="", answers=(answer,)
    )
    return contains(text, example) == 1


def check_answer(placed: Placed) -> None:
    """The answer stands in its fact alone: no other statement gives it away, nor the question."""
    problem = placed.problem
    (answer,) = problem.answers
    texts = [text for _, text in placed.statements]
    assert len(set(texts)) == len(texts)
    assert [has(text, answer.text) for text in texts].count(True) == 1
    assert has(problem.statements[answer.statement], answer.text)
    assert not has(problem.question, answer.text)
    assert all(0 <= depth <= 1 for depth, _ in placed.statements)
    assert list(placed.depths) == sorted(placed.depths)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_gold_and_seeds(tokenizer: Any, name: str) -> None:
    for index in range(4):
        for num_tokens in (1500, 2048):
            example = make(tokenizer, name, num_tokens, index)
            assert (example.subtask, example.metric) == (name, "contains")
            assert 0.95 * num_tokens <= len(example.prompt.ids) <= num_tokens
        assert make(tokenizer, name, 2048, index).prompt.ids == example.prompt.ids
        assert len(example.gold) == (1 if name == "near_misses" else 2)
        parts = [tokenizer.decode(example.prompt.ids[a:b]).strip() for a, b in example.gold]
        assert all(part.endswith(".") for part in parts)
        assert any(has(part, answer) for part in parts for answer in example.answers)


def test_the_vocabulary_of_near_misses_is_its_own() -> None:
    """What was tuned on another vocabulary would be measured on itself."""
    for relations in VOCABULARIES.values():
        subjects = {s.lower() for r in relations for s in r.subjects}
        forms = {f for r in relations for f in (*r.statements, *r.questions)}
        for relation in NEAR_MISSES:
            assert not {s.lower() for s in relation.subjects} & subjects
            assert not {*relation.statements, *relation.questions} & forms
            assert len(set(relation.subjects)) >= 10 <= len(set(relation.values))
            for one, other in combinations(relation.subjects, 2):
                assert one not in other
                assert other not in one


def test_near_misses_are_everywhere_in_the_document() -> None:
    """Near misses that all stood beside the fact would be in its own segment alone."""
    for seed in range(20):
        for relation in NEAR_MISSES:
            placed = draw_near_misses(Random(seed), relation, 0.4)
            check_answer(placed)
            assert [int(9 * depth) for depth, _ in placed.others] == list(range(9))


def test_natural_facts_can_be_placed() -> None:
    for seed in range(5):
        for relation in VOCABULARIES["evaluation"]:
            check_answer(draw_natural(Random(seed), relation, 0.7))


def test_there_are_enough_pairs_of_relations() -> None:
    assert len(LINKS) >= 16
    forms = [form for link in LINKS for form in (*link.named, *link.linked, *link.questions)]
    assert len(set(forms)) == len(forms)
    assert all(len(link.named) >= 2 <= len(link.linked) for link in LINKS)
    assert all(len(link.subjects) >= 5 and len(link.values) >= 6 for link in LINKS)


@pytest.mark.parametrize("is_linked_last", [False, True])
def test_the_linked_fact_shares_no_name_with_the_question(is_linked_last: bool) -> None:
    for link in LINKS:
        for seed in range(10):
            placed = draw_pair(Random(seed), link, is_linked_last=is_linked_last)
            check_answer(placed)
            problem = placed.problem
            assert placed.linked == int(is_linked_last)
            assert placed.depths[0] < 0.5 <= placed.depths[1]
            linked, named = problem.statements[placed.linked], problem.statements[1 - placed.linked]
            (name,) = (n for n in link.names if n.lower() in linked.lower())
            assert name.lower() in named.lower()
            assert name.lower() not in problem.question.lower()
            (subject,) = (s for s in link.subjects if s in problem.question)
            assert subject in named
            assert not re.search(rf"\b{subject}\b", linked, re.IGNORECASE)
            others = " ".join(text for _, text in placed.others).lower()
            assert name.lower() not in others


def test_an_article_is_no_part_of_an_answer() -> None:
    """The document says "a red key", and "the red key" or "Red key" counted as wrong."""
    (link,) = (link for link in LINKS if "a red key" in link.values)
    for seed in range(10):
        (answer,) = (problem := draw_pair(Random(seed), link, is_linked_last=True).problem).answers
        statement, stop = problem.statements[answer.statement], answer.start + len(answer.text)
        assert statement[answer.start : stop] == answer.text
        assert f"a {answer.text}" in link.values
        assert has(f"With the {answer.text}.", answer.text)


def test_a_definition_is_at_the_beginning_and_its_use_far_from_it() -> None:
    assert len(DEFINITIONS) >= 4
    assert len(DUTIES) >= 4
    for seed in range(50):
        (placed,) = draw_definitions(Random(seed), 1)
        check_answer(placed)
        definition, duty = placed.problem.statements
        assert placed.linked == 0
        assert placed.depths[0] <= 0.02
        assert placed.depths[1] >= 0.5
        (term,) = (term for term in TERMS if term in definition)
        assert term in duty
        assert term not in placed.problem.question
        assert not any(re.search(rf"\b{term}\b", text) for _, text in placed.others)


def test_a_company_is_not_named_after_what_the_question_asks_about() -> None:
    """BM25 would find the definition of "Sextant Cranes" by the word crane in the question."""
    texts = [*DEFINITIONS, *COMPANIES]
    for thing in THINGS:
        assert not any(word[:5] in text.lower() for word in thing.split() for text in texts)
    assert not any("company" in text.lower() for text in texts)


def test_both_orders_of_a_pair_take_turns(tokenizer: Any) -> None:
    for index in range(4):
        example = make(tokenizer, "pairs", index=index)
        (linked,) = example.linked
        assert example.gold.index(linked) == (1 if index % 2 == 0 else 0)
        assert recall(example.linked, [linked]) == 1.0
        assert recall(example.gold, [linked]) == pytest.approx(0.5, abs=0.2)
    assert make(tokenizer, "near_misses").linked == ()
    assert make(tokenizer, "far_definition").linked[0][0] < 200


def test_definitions_of_one_document_do_not_contradict_each_other() -> None:
    assert MOST_DEFINITIONS >= 5
    assert len(TERMS) == len(COMPANIES) == len(THINGS)
    drawn = draw_definitions(Random(1), MOST_DEFINITIONS)
    texts = [text for placed in drawn for _, text in placed.statements]
    for words in (TERMS, THINGS, COMPANIES):
        counts = [sum(bool(re.search(rf"\b{word}\b", text)) for text in texts) for word in words]
        assert counts == [2 if words is TERMS else 1] * len(words)
