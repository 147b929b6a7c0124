"""Facts that need thought: some imply the answer, some lead to it in steps.

`associative` follows NoLiMa's idea: question and fact share no word. `chain` follows BABILong's:
several facts must be followed through a long text. Items and generators are gemserve's own.
"""

from __future__ import annotations

from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.synthetic.problems import Answer, Problem
from gemserve.synthetic.prose import topics_sentences
from gemserve_lab.tasks.haystack import hide
from gemserve_lab.tasks.words_associative import NAMES, PAIRS

DISTRACTORS = 3  # persons that the question is not about
_PEOPLE = ("Jonas", "Miriam", "Oskar", "Elif", "Ruben", "Hanna", "Matteo", "Signe")
_THINGS = ("lantern", "apple", "hammer", "letter", "candle", "basket", "trumpet", "mirror")
_ROOMS = ("cellar", "kitchen", "garden", "attic", "hallway", "bathroom", "bedroom", "garage")
_TAKES = ("{p} took the {t}.", "{p} picked up the {t}.", "{p} grabbed the {t}.")
_GOES = ("{p} went to the {r}.", "{p} walked to the {r}.", "{p} moved to the {r}.")
_GIVES = ("{p} gave the {t} to {q}.", "{p} handed the {t} to {q}.", "{p} passed the {t} to {q}.")


def associative(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask whom the document describes by something that implies the question."""
    rng = draw.rng("needle associative")
    (fact, question), *rest = rng.sample(PAIRS, 1 + DISTRACTORS)
    name, *names = rng.sample(NAMES, 1 + DISTRACTORS)
    statement = fact.format(name=name)
    problem = Problem(
        kind="associative",
        statements=(statement,),
        question=question,
        answers=(Answer(name, 0, statement.index(name)),),
        gold=(0,),
    )
    others = [form.format(name=n) for (form, _), n in zip(rest, names, strict=True)]
    return hide(
        tokenizer, "associative", draw, rng, problem, others=others, sentences=topics_sentences()
    )


def chain(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask where a thing is that somebody took, perhaps gave away, and carried somewhere.

    Two facts have to be followed if `draw.index` is even, three if it is odd.
    """
    rng = draw.rng("needle chain")
    problem, others = draw_chain(rng, 2 + draw.index % 2)
    return hide(tokenizer, "chain", draw, rng, problem, others=others, sentences=topics_sentences())


def draw_chain(rng: Random, num_facts: int) -> tuple[Problem, list[str]]:
    """Facts to follow, in order, and others about other persons, things and rooms.

    Nobody else goes to the room of the answer, and whoever has the thing does not move afterwards.
    """
    holder, receiver, *strangers = rng.sample(_PEOPLE, 4)
    thing, *things = rng.sample(_THINGS, 3)
    room, *rooms = rng.sample(_ROOMS, 3)
    facts = [rng.choice(_TAKES).format(p=holder, t=thing)]
    if num_facts == 3:
        facts.append(rng.choice(_GIVES).format(p=holder, t=thing, q=receiver))
        holder = receiver
    facts.append(rng.choice(_GOES).format(p=holder, r=room))
    others: list[str] = []
    for person, other, place in zip(strangers, things, rooms, strict=True):
        others.append(rng.choice(_TAKES).format(p=person, t=other))
        others.append(rng.choice(_GOES).format(p=person, r=place))
    problem = Problem(
        kind="chain",
        statements=tuple(facts),
        question=f"Where is the {thing}?",
        answers=(Answer(room, len(facts) - 1, facts[-1].index(room)),),
        gold=tuple(range(len(facts))),
    )
    return problem, others
