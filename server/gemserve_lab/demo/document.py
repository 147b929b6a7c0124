"""The demo's documents: reference prose with a hidden fact, and a question about it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.synthetic.facts import draw_needles
from gemserve.synthetic.natural_facts import VOCABULARIES, draw_facts
from gemserve.synthetic.prose import stdlib_sentences, topics_sentences

_SENTENCES_AT_ONCE = 16  # sentences added between two counts of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenFact:
    """A document, the statement that answers the question, and its place, from 0 to 1.

    `answers`: what a right answer has to contain. `other`: a fact of the same form about something
    else, which is in the document too; "" if there is none.
    """

    document: str
    statement: str
    question: str
    answers: tuple[str, ...]
    depth: float
    other: str = ""

    @property
    def prompt(self) -> str:
        return f"{self.document}\n\n{self.question}"


def natural_document(tokenizer: Any, num_tokens: int, seed: int) -> HiddenFact:
    """At least `num_tokens` tokens of Python's language reference, with two facts of one form."""
    rng = random.Random(f"demo {seed}")
    problem, (other,) = draw_facts(rng, rng.choice(VOCABULARIES["evaluation"]), 1, 1)
    (statement,) = problem.statements
    sentences = _prose(tokenizer, topics_sentences(), num_tokens, rng)
    at = rng.randrange(len(sentences) // 8, len(sentences) // 2)
    behind = rng.randrange(len(sentences) // 2, len(sentences))
    pieces = [*sentences[:at], statement, *sentences[at:behind], other, *sentences[behind:]]
    return HiddenFact(
        document=" ".join(pieces),
        statement=statement,
        question=problem.question,
        answers=tuple(answer.text for answer in problem.answers),
        depth=at / len(sentences),
        other=other,
    )


def synthetic_document(tokenizer: Any, num_tokens: int, seed: int) -> HiddenFact:
    """At least `num_tokens` tokens of docstrings, with a fact in the built-in model's form."""
    rng = random.Random(seed)
    (needle,) = draw_needles(rng, 1)
    sentences = _prose(tokenizer, stdlib_sentences(), num_tokens, rng)
    at = rng.randrange(len(sentences) // 8, len(sentences) // 2)
    return HiddenFact(
        document=" ".join([*sentences[:at], needle.statement, *sentences[at:]]),
        statement=needle.statement,
        question=needle.question,
        answers=(needle.value,),
        depth=at / len(sentences),
    )


def _prose(
    tokenizer: Any, sentences: Sequence[str], num_tokens: int, rng: random.Random
) -> list[str]:
    """Consecutive sentences from a random one on, until they have `num_tokens` tokens."""
    start = rng.randrange(len(sentences))
    chosen: list[str] = []
    while not chosen or len(tokenizer.encode(" ".join(chosen))) < num_tokens:
        at = start + len(chosen)
        chosen += [sentences[(at + i) % len(sentences)] for i in range(_SENTENCES_AT_ONCE)]
    return chosen
