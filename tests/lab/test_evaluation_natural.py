"""Natural facts: the answer stands once, where gold says, and vocabularies share nothing."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest

from gemserve.calibration.search.example import Example, ExampleDraw, contains
from gemserve.synthetic.natural_facts import (
    FILLERS,
    KINDS,
    VOCABULARIES,
    VocabularyName,
    draw_facts,
)
from gemserve.synthetic.prose import stdlib_sentences, topics_sentences
from gemserve_lab.tasks.natural import NaturalKind, natural_maker

NAMES: tuple[VocabularyName, ...] = get_args(VocabularyName)


def example(
    tokenizer: Any, vocabulary: VocabularyName, kind: NaturalKind, draw: ExampleDraw | None = None
) -> Example:
    draw = draw or ExampleDraw(seed=1, num_tokens=900, index=2, samples=5)
    return natural_maker(vocabulary, kind)(tokenizer, draw)


def test_vocabularies_share_no_wording_subject_or_value() -> None:
    """What was chosen on one would be measured on itself where another repeats it."""
    entries = {
        name: (
            {x.lower() for r in relations for x in (*r.subjects, *r.values)},
            {x.lower() for r in relations for x in (*r.statements, *r.questions)},
        )
        for name, relations in VOCABULARIES.items()
    }
    for one, other in combinations(entries.values(), 2):
        assert not one[0] & other[0]
        assert not one[1] & other[1]


def test_fillers_of_what_is_chosen_and_of_what_is_measured_are_different() -> None:
    assert not set(stdlib_sentences()) & set(topics_sentences())
    assert FILLERS["evaluation"] is topics_sentences
    assert len(topics_sentences()) > 1000


@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_varied(name: VocabularyName) -> None:
    for kind in KINDS:
        relations = [r for r in VOCABULARIES[name] if r.kind == kind]
        assert len(relations) >= 3
        assert all(len(r.statements) >= 3 and len(r.questions) >= 2 for r in relations)


@pytest.mark.parametrize("name", NAMES)
def test_no_fact_says_what_another_one_is_asked_for(name: VocabularyName) -> None:
    """A distractor with the right value in it would let a wrong passage pass for the right one."""
    draw = ExampleDraw(seed=0, num_tokens=1, index=0, samples=1)
    for relation in VOCABULARIES[name]:
        assert len(set(relation.values)) == len(relation.values)
        for one, other in combinations(relation.subjects, 2):
            assert one not in other
            assert other not in one
        rng = draw.rng(relation.statements[0])
        for _ in range(20):
            problem, others = draw_facts(rng, relation, 2, 3)
            texts = [*problem.statements, *others]
            assert len(set(texts)) == 5
            for answer in problem.answers:
                wanted = Answered(answer.text)
                assert [wanted.by(text) for text in texts].count(True) == 1
                assert wanted.by(texts[answer.statement])
                assert not wanted.by(problem.question)


class Answered:
    """Whether a text has the answer, by the metric that will say so."""

    def __init__(self, answer: str) -> None:
        from gemserve.prompting.prompt import Prompt

        self._example = Example(
            subtask="a",
            num_tokens=1,
            index=0,
            prompt=Prompt([0], ()),
            question="",
            answers=(answer,),
        )

    def by(self, text: str) -> bool:
        return contains(text, self._example) == 1


@pytest.mark.parametrize("kind", [*KINDS, "several"])
@pytest.mark.parametrize("name", NAMES)
def test_gold_is_the_statements_and_has_the_answers(
    tokenizer: Any, name: VocabularyName, kind: NaturalKind
) -> None:
    made = example(tokenizer, name, kind)
    assert made.metric == "contains"
    assert len(made.gold) == len(made.answers) == (2 if kind == "several" else 1)
    parts = [tokenizer.decode(made.prompt.ids[a:b]).strip() for a, b in made.gold]
    for part in parts:
        assert part[0].isupper() or part[0].isdigit()
        assert part.endswith(".")
        assert sum(part.count(answer) for answer in made.answers) == 1
    assert made.question in made.prompt.text
    assert Answered(made.answers[0]).by(made.prompt.text)


@pytest.mark.parametrize("num_tokens", [700, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_the_nominal_length_is_kept(tokenizer: Any, name: VocabularyName, num_tokens: int) -> None:
    for index, kind in enumerate((*KINDS, "several")):
        draw = ExampleDraw(seed=4, num_tokens=num_tokens, index=index, samples=5)
        made = example(tokenizer, name, kind, draw)
        assert 0.95 * num_tokens <= len(made.prompt.ids) <= num_tokens


def test_depths_are_spread_over_the_samples(tokenizer: Any) -> None:
    """Facts that all stood at the end would be found by any filter."""
    draws = [ExampleDraw(seed=0, num_tokens=1500, index=i, samples=6) for i in range(6)]
    made = [example(tokenizer, "evaluation", "place", draw) for draw in draws]
    starts = [m.gold[0][0] / len(m.prompt.ids) for m in made]
    assert starts == sorted(starts)
    assert starts[0] < 0.25
    assert starts[-1] > 0.75


def test_a_draw_follows_from_its_seed(tokenizer: Any) -> None:
    for kind in (*KINDS, "several"):
        prompts = [
            example(
                tokenizer,
                "evaluation",
                kind,
                ExampleDraw(seed=seed, num_tokens=800, index=1, samples=4),
            ).prompt.ids
            for seed in (5, 5, 6)
        ]
        assert prompts[0] == prompts[1] != prompts[2]
