"""Facts that answer a question only together, and stand far from each other.

The question names what one of them is about. The other, the linked fact, shares no name with it: a
filter that reads each part of a document alone with the question cannot know that it is needed.
"""

from __future__ import annotations

from random import Random
from typing import Any

from gemserve.evaluation.tasks.example import Example, ExampleDraw
from gemserve.evaluation.tasks.haystack import Placed, hide_placed
from gemserve.evaluation.tasks.words_linked import (
    COMPANIES,
    DATES,
    DEFINITIONS,
    DUTIES,
    LINKS,
    TERMS,
    THINGS,
    Link,
)
from gemserve.synthetic.problems import Answer, Problem
from gemserve.synthetic.prose import topics_sentences

DISTRACTORS = 2  # further pairs of facts of the same forms
_BEGINNING = 0.02  # the share of a document in which terms are defined
_FAR = 0.5  # duties stand behind this share of it
_MAX_TOKENS = 48


def pairs(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Two facts in different halves: the linked one comes last if `draw.index` is even."""
    rng = draw.rng("needle pairs")
    placed = draw_pair(rng, rng.choice(LINKS), is_linked_last=draw.index % 2 == 0)
    return _hide(tokenizer, "pairs", draw, rng, placed)


def far_definition(tokenizer: Any, draw: ExampleDraw) -> Example:
    """A term that is defined at the document's beginning and used in its second half."""
    rng = draw.rng("needle far_definition")
    return _hide(tokenizer, "far_definition", draw, rng, draw_definition(rng))


def _hide(tokenizer: Any, name: str, draw: ExampleDraw, rng: Random, placed: Placed) -> Example:
    return hide_placed(
        tokenizer, name, draw, rng, placed, sentences=topics_sentences(), max_tokens=_MAX_TOKENS
    )


def draw_pair(rng: Random, link: Link, *, is_linked_last: bool) -> Placed:
    """Two facts, one in each half of a document, and pairs about other subjects anywhere."""
    count = 1 + DISTRACTORS
    subjects = rng.sample(link.subjects, count)
    names = rng.sample(link.names, count)
    values = rng.sample(link.values, count)
    named = [
        _sentence(rng.choice(link.named).format(s=s, m=m))
        for s, m in zip(subjects, names, strict=True)
    ]
    linked = [
        _sentence(rng.choice(link.linked).format(m=m, v=v))
        for m, v in zip(names, values, strict=True)
    ]
    depths = rng.random() / 2, 0.5 + rng.random() / 2
    facts = (named[0], linked[0]) if is_linked_last else (linked[0], named[0])
    at = facts.index(linked[0])
    problem = Problem(
        kind="pairs",
        statements=facts,
        question=rng.choice(link.questions).format(s=subjects[0]),
        answers=(Answer(values[0], at, facts[at].lower().index(values[0].lower())),),
        gold=(0, 1),
    )
    others = tuple((rng.random(), fact) for fact in (*named[1:], *linked[1:]))
    return Placed(problem, depths, others, linked=at)


def draw_definition(rng: Random) -> Placed:
    """A definition and the duty that uses its term, and others of other terms and things."""
    count = 1 + DISTRACTORS
    terms, companies = rng.sample(TERMS, count), rng.sample(COMPANIES, count)
    things, dates = rng.sample(THINGS, count), rng.sample(DATES, count)
    definitions = [
        rng.choice(DEFINITIONS).format(t=t, c=c) for t, c in zip(terms, companies, strict=True)
    ]
    chosen = rng.choice(DUTIES)
    forms = [chosen[0], *(rng.choice(DUTIES)[0] for _ in range(DISTRACTORS))]
    duties = [
        form.format(t=t, x=x, d=d)
        for form, t, x, d in zip(forms, terms, things, dates, strict=True)
    ]
    problem = Problem(
        kind="far_definition",
        statements=(definitions[0], duties[0]),
        question=chosen[1].format(x=things[0]),
        answers=(Answer(companies[0], 0, definitions[0].index(companies[0])),),
        gold=(0, 1),
    )
    others = tuple((_BEGINNING * rng.random(), text) for text in definitions[1:])
    others += tuple((_FAR + (1 - _FAR) * rng.random(), text) for text in duties[1:])
    depths = _BEGINNING * rng.random(), _FAR + (1 - _FAR) * rng.random()
    return Placed(problem, depths, others, linked=0)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
