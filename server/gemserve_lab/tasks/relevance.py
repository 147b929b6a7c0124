"""`relevance`: what makes dropping tokens easy or hard, varied one property at a time.

The properties come from the token-sparsification theory of shallow vision transformers: the share
of tokens that say the answer (α*, `relevant_…`), the share that say nearly the same about something
else (α#, `confusing_…`), and the share of filler words replaced by others (τ, `noise_…`). A
selection is useful where it beats a random one and one by position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from gemserve.calibration.search.example import (
    Example,
    ExampleDraw,
    Maker,
    Subtasks,
    find_spans,
    question_prompt,
)
from gemserve.synthetic.facts import QUESTIONS, STATEMENTS, draw_value
from gemserve.synthetic.prose import stdlib_sentences
from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS
from gemserve_lab.tasks.haystack import draw_filler

RELEVANT = (1.0, 0.1, 0.01, 0.001)
CONFUSING = (0.01, 0.1, 0.5)
NOISE = (0.1, 0.5)
_OVERHEAD = 64  # tokens reserved for template and question


def _example(
    tokenizer: Any,
    draw: ExampleDraw,
    *,
    subtask: str,
    relevant: float = 0.001,
    confusing: float = 0.0,
    noise: float = 0.0,
) -> Example:
    """A document with the given shares of relevant, confusing and noise tokens."""
    rng = draw.rng(f"relevance {subtask}")
    noun, attribute, value = rng.choice(NOUNS), rng.choice(ATTRIBUTES), draw_value(rng)
    adjective, *other_adjectives = rng.sample(ADJECTIVES, len(ADJECTIVES))
    room = draw.num_tokens - _OVERHEAD

    def right_fact() -> tuple[str, str]:
        return f"{adjective} {noun}", value

    def wrong_fact() -> tuple[str, str]:
        return f"{rng.choice(other_adjectives)} {noun}", draw_value(rng)

    right = _statements(tokenizer, rng, attribute, right_fact, relevant * room, room)
    wrong = _statements(tokenizer, rng, attribute, wrong_fact, confusing * room, room)
    room -= sum(_count(tokenizer, s) for s in (*right, *wrong))
    sentences = stdlib_sentences()
    if noise > 0:
        sentences = tuple(_noisy(sentence, noise, rng) for sentence in sentences)
    filler = draw_filler(tokenizer, sentences, max(0, room), rng)
    arranged = _arranged(filler, [*wrong, *right], rng)
    is_right = set(right)
    question = rng.choice(QUESTIONS).format(subject=f"{adjective} {noun}", attribute=attribute)
    prompt = question_prompt(tokenizer, " ".join(arranged), question)
    return Example(
        subtask=subtask,
        num_tokens=draw.num_tokens,
        index=draw.index,
        prompt=prompt,
        question=question,
        answers=(value,),
        gold=find_spans(prompt, [piece for piece in arranged if piece in is_right]),
    )


def _statements(
    tokenizer: Any,
    rng: Random,
    attribute: str,
    draw_fact: Callable[[], tuple[str, str]],
    wanted: float,
    room: int,
) -> list[str]:
    """Statements of drawn facts (subject and value): `wanted` tokens or more, at most `room`."""
    statements: list[str] = []
    total = 0
    while total < wanted:
        subject, value = draw_fact()
        form = rng.choice(STATEMENTS)
        statements.append(form.format(subject=subject, attribute=attribute, value=value))
        total += _count(tokenizer, statements[-1])
        if total > room:
            statements.pop()
            break
    return statements


def _arranged(filler: Sequence[str], statements: Sequence[str], rng: Random) -> list[str]:
    """Filler in its order, and statements at random places in it."""
    pieces = [*filler, *statements]
    order = list(range(len(pieces)))
    rng.shuffle(order)
    places = sorted(order[: len(filler)]) + order[len(filler) :]
    return [piece for _, piece in sorted(zip(places, pieces, strict=True))]


def _noisy(sentence: str, share: float, rng: Random) -> str:
    words = sentence.split(" ")
    return " ".join(rng.choice(NOUNS) if rng.random() < share else word for word in words)


def _count(tokenizer: Any, sentence: str) -> int:
    return len(tokenizer.backend_tokenizer.encode(" " + sentence, add_special_tokens=False).ids)


def _subtasks() -> dict[str, Maker]:
    made: dict[str, Maker] = {}
    for share in RELEVANT:
        name = f"relevant_{share:g}"
        made[name] = partial(_example, subtask=name, relevant=share)
    for share in CONFUSING:
        name = f"confusing_{share:g}"
        made[name] = partial(_example, subtask=name, confusing=share)
    for share in NOISE:
        name = f"noise_{share:g}"
        made[name] = partial(_example, subtask=name, noise=share)
    return made


SUBTASKS: Subtasks = _subtasks()
