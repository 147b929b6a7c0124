"""Facts that answer a question only together, and stand far from each other.

The question names what one of them is about. The other, the linked fact, shares no name with it: a
filter that reads each part of a document alone with the question cannot know that it is needed.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.synthetic.problems import Answer, Problem
from gemserve.synthetic.prose import topics_sentences
from gemserve_lab.tasks.haystack import Placed, hide_placed
from gemserve_lab.tasks.words_linked import (
    COMPANIES,
    DATES,
    DEFINITIONS,
    DUTIES,
    LINKS,
    TERMS,
    THINGS,
    Link,
)

DISTRACTORS = 2  # further pairs of facts of the same forms
_BEGINNING = 0.02  # the share of a document in which terms are defined
_FAR = 0.5  # duties stand behind this share of it
_MAX_TOKENS = 48
_ARTICLE = re.compile(r"^(a|an|the) ")
# Terms, companies and things are each in one problem of a document alone.
MOST_DEFINITIONS = len(TERMS) // (1 + DISTRACTORS)


def pairs(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Two facts in different halves: the linked one comes last if `draw.index` is even."""
    rng = draw.rng("needle pairs")
    placed = draw_pair(rng, rng.choice(LINKS), is_linked_last=draw.index % 2 == 0)
    return _hide(tokenizer, "pairs", draw, rng, placed)


def far_definition(tokenizer: Any, draw: ExampleDraw) -> Example:
    """A term that is defined at the document's beginning and used in its second half."""
    rng = draw.rng("needle far_definition")
    return _hide(tokenizer, "far_definition", draw, rng, draw_definitions(rng, 1)[0])


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
    value = _ARTICLE.sub("", values[0])  # "the red key" is a right answer where "a red key" stands
    start = facts[at].lower().index(values[0].lower()) + len(values[0]) - len(value)
    problem = Problem(
        kind="pairs",
        statements=facts,
        question=rng.choice(link.questions).format(s=subjects[0]),
        answers=(Answer(value, at, start),),
        gold=(0, 1),
    )
    others = tuple((rng.random(), fact) for fact in (*named[1:], *linked[1:]))
    return Placed(problem, depths, others, linked=at)


def draw_definitions(rng: Random, count: int) -> list[Placed]:
    """Problems for one document, each a definition and the duty that uses its term.

    Each has others beside it, of other terms, companies and things; `MOST_DEFINITIONS` at most.
    """
    total = count * (1 + DISTRACTORS)
    named = zip(*(rng.sample(words, total) for words in (TERMS, COMPANIES, THINGS)), strict=True)
    drawn = list(named)
    size = 1 + DISTRACTORS
    return [_definition(rng, drawn[start : start + size]) for start in range(0, total, size)]


def _definition(rng: Random, drawn: list[tuple[str, str, str]]) -> Placed:
    """A problem about the first term, company and thing; the further ones are distractors."""
    definitions = [rng.choice(DEFINITIONS).format(t=term, c=company) for term, company, _ in drawn]
    chosen = rng.choice(DUTIES)
    forms = [chosen[0], *(rng.choice(DUTIES)[0] for _ in drawn[1:])]
    dates = rng.sample(DATES, len(drawn))
    duties = [
        form.format(t=term, x=thing, d=date)
        for form, (term, _, thing), date in zip(forms, drawn, dates, strict=True)
    ]
    _, company, thing = drawn[0]
    problem = Problem(
        kind="far_definition",
        statements=(definitions[0], duties[0]),
        question=chosen[1].format(x=thing),
        answers=(Answer(company, 0, definitions[0].index(company)),),
        gold=(0, 1),
    )
    others = tuple((_BEGINNING * rng.random(), text) for text in definitions[1:])
    others += tuple((_far(rng), text) for text in duties[1:])
    return Placed(problem, (_BEGINNING * rng.random(), _far(rng)), others, linked=0)


def _far(rng: Random) -> float:
    return _FAR + (1 - _FAR) * rng.random()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
