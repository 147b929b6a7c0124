"""Natural facts: sentences of prose that say where, who, how many or why, and questions.

A document hides the fact in question among others of its form: the same relation of other subjects
to other values. Three vocabularies share no wording, subject or value. So a choice that was made
with one can be confirmed with the second and measured with the third, in filler of another source.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Literal

from gemserve.calibration.search.example import Example, ExampleDraw, Maker
from gemserve.synthetic.natural_facts import (
    FILLERS,
    KINDS,
    SEVERAL,
    VOCABULARIES,
    VocabularyName,
    draw_facts,
    lead_in,
)
from gemserve.synthetic.problems import Problem
from gemserve.synthetic.prose import topics_sentences
from gemserve.synthetic.vocabulary import Kind, Relation
from gemserve.synthetic.words_near_misses import NEAR_MISSES
from gemserve_lab.tasks.haystack import Placed, hide, hide_placed

NaturalKind = Kind | Literal["several"]

# How questions begin, because small models need a hint where to look. Every third has no hint.
LEADS: dict[VocabularyName, tuple[str, ...]] = {
    "calibration": ("According to the document, ", "Judging by the document, ", ""),
    "confirmation": ("According to the passage, ", "In this passage, ", ""),
    "evaluation": ("According to the text, ", "Going by the text, ", ""),
}
DISTRACTORS = 3  # further facts of the same form
NEAR_MISSES_COUNT = 9  # further facts of the same form in `near_misses`
_MAX_TOKENS = 64


def natural_maker(
    vocabulary: VocabularyName,
    kind: NaturalKind,
    *,
    subtask: str = "natural",
    is_question_first: bool = False,
) -> Maker:
    """Draws examples of one kind of fact, or of any kind with `SEVERAL` facts at once.

    A single fact moves through the depths as `draw.index` goes up, at a random place within its
    sample's share.
    """

    def make(tokenizer: Any, draw: ExampleDraw) -> Example:
        rng = draw.rng(f"natural {vocabulary} {kind}")
        relations = [r for r in VOCABULARIES[vocabulary] if kind in (r.kind, "several")]
        count = SEVERAL if kind == "several" else 1
        problem, others = draw_facts(rng, rng.choice(relations), count, DISTRACTORS)
        problem = replace(
            problem, question=lead_in(rng.choice(LEADS[vocabulary]), problem.question)
        )
        depth = (draw.index % draw.samples + rng.random()) / draw.samples
        return hide(
            tokenizer,
            subtask,
            draw,
            rng,
            problem,
            others=others,
            depth=None if kind == "several" else depth,
            sentences=FILLERS[vocabulary](),
            is_question_first=is_question_first,
            max_tokens=_MAX_TOKENS,
        )

    return make


def natural(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One natural fact. Places, persons, numbers and clauses take turns."""
    return natural_maker("evaluation", KINDS[draw.index % len(KINDS)])(tokenizer, draw)


def natural_several(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Several natural facts of one relation in one question."""
    return natural_maker("evaluation", "several", subtask="natural_several")(tokenizer, draw)


def question_first(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Like `natural`, but the question is before the document, and nothing follows it."""
    make = natural_maker(
        "evaluation",
        KINDS[draw.index % len(KINDS)],
        subtask="question_first",
        is_question_first=True,
    )
    return make(tokenizer, draw)


def near_misses(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One natural fact. Nine others of its form are spread evenly over the document."""
    rng = draw.rng("needle near_misses")
    depth = (draw.index % draw.samples + rng.random()) / draw.samples
    relation = NEAR_MISSES[draw.index % len(NEAR_MISSES)]
    return hide_placed(
        tokenizer,
        "near_misses",
        draw,
        rng,
        draw_near_misses(rng, relation, depth),
        sentences=topics_sentences(),
        max_tokens=_MAX_TOKENS,
    )


def draw_near_misses(rng: Random, relation: Relation, depth: float) -> Placed:
    """A fact at `depth`, and one of its form in each ninth of the document."""
    problem, others = _draw_asked(rng, relation, NEAR_MISSES_COUNT)
    depths = [(share + rng.random()) / len(others) for share in range(len(others))]
    return Placed(problem, (depth,), tuple(zip(depths, others, strict=True)))


def draw_natural(rng: Random, relation: Relation, depth: float) -> Placed:
    """A fact of `natural` at `depth`, and others of its form anywhere."""
    problem, others = _draw_asked(rng, relation, DISTRACTORS)
    return Placed(problem, (depth,), tuple((rng.random(), other) for other in others))


def _draw_asked(rng: Random, relation: Relation, others: int) -> tuple[Problem, list[str]]:
    problem, rest = draw_facts(rng, relation, 1, others)
    lead = rng.choice(LEADS["evaluation"])
    return replace(problem, question=lead_in(lead, problem.question)), rest
