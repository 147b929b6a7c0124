"""Natural facts and questions about them, drawn from one of three vocabularies.

The vocabularies share no wording, subject or value: what is chosen on one can be confirmed on the
second and measured on the third.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal, get_args

from gemserve.synthetic.problems import Answer, Problem
from gemserve.synthetic.prose import stdlib_sentences, topics_sentences
from gemserve.synthetic.vocabulary import Kind, Relation, Vocabulary
from gemserve.synthetic.words_calibration import CALIBRATION
from gemserve.synthetic.words_confirmation import CONFIRMATION
from gemserve.synthetic.words_evaluation import EVALUATION

VocabularyName = Literal["calibration", "confirmation", "evaluation"]
VOCABULARIES: dict[VocabularyName, Vocabulary] = {
    "calibration": CALIBRATION,
    "confirmation": CONFIRMATION,
    "evaluation": EVALUATION,
}
KINDS: tuple[Kind, ...] = get_args(Kind)
FILLERS: dict[VocabularyName, Callable[[], tuple[str, ...]]] = {
    "calibration": stdlib_sentences,
    "confirmation": stdlib_sentences,
    "evaluation": topics_sentences,
}
SEVERAL = 2  # facts in one question


def draw_facts(
    rng: Random, relation: Relation, count: int, distractors: int
) -> tuple[Problem, list[str]]:
    """A question about `count` facts of a relation, and statements of `distractors` other facts."""
    total = count + distractors
    subjects = rng.sample(relation.subjects, total)
    values = rng.sample(relation.values, total)
    facts = [
        rng.choice(relation.statements).format(s=subject, v=value)
        for subject, value in zip(subjects, values, strict=True)
    ]
    form = rng.choice(relation.questions)
    asked = rng.sample(range(count), count)
    questions = [form.format(s=subjects[i]).removesuffix("?") for i in asked]
    rest = [lead_in("and ", question) for question in questions[1:]]
    problem = Problem(
        kind="natural",
        statements=tuple(facts[:count]),
        question=", ".join([questions[0], *rest]) + "?",
        answers=tuple(Answer(values[i], i, facts[i].index(values[i])) for i in asked),
        gold=tuple(range(count)),
    )
    return problem, facts[count:]


def lead_in(words: str, question: str) -> str:
    return f"{words}{question[0].lower()}{question[1:]}" if words else question
