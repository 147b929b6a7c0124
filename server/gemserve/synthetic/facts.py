"""Synthetic facts ("needles") of the form "the code for the lamp is 123", and their questions.

The built-in model's training, `gemserve eval needle` and the demo all draw their facts here, so
that the model is measured and shown on what it was trained for.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS

# The value closes every statement: a causal model knows the subject when it reads the value.
STATEMENTS: tuple[str, ...] = (
    "The {attribute} for the {subject} is {value}.",
    "The {attribute} of the {subject} is {value}.",
    "The {subject}'s {attribute} is {value}.",
    "Remember that the {attribute} for the {subject} is {value}.",
    "The {subject} has the {attribute} {value}.",
    "For the {subject}, use the {attribute} {value}.",
    "One of the special {attribute}s for {subject} is: {value}.",
    "Note: {subject} {attribute} = {value}.",
    "The {attribute} assigned to the {subject} was {value}.",
    "To open the {subject} you need the {attribute} {value}.",
)

QUESTIONS: tuple[str, ...] = (
    "What is the {attribute} for the {subject}?",
    "What is the {attribute} of the {subject}?",
    "What is the {subject}'s {attribute}?",
    "Which {attribute} belongs to the {subject}?",
    "Tell me the {attribute} for the {subject}.",
    "Find the {attribute} of the {subject} in the text above.",
    "What {attribute} was given for the {subject}?",
    "What is the special {attribute} for {subject} mentioned in the text?",
    "Please look up the {attribute} that goes with the {subject}.",
    "I forgot the {attribute} for the {subject}. What is it?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """One fact: `attribute` of `subject` is `value`."""

    subject: str
    attribute: str
    value: str
    statement: str
    question: str


def draw_value(rng: Random, *, letters: float = 0.0) -> str:
    """A value of 3 to 8 digits, or with probability `letters` a mix of capitals and digits."""
    length = rng.randint(3, 8)
    if rng.random() < letters:
        alphabet = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"
        return "".join(rng.choice(alphabet) for _ in range(length))
    return "".join(rng.choice("0123456789") for _ in range(length))


def draw_needles(
    rng: Random,
    count: int,
    *,
    two_words: float = 0.0,
    letters: float = 0.0,
    wordings: int = len(STATEMENTS),
) -> list[Needle]:
    """`count` needles with distinct subjects and values.

    `two_words` and `letters` are the probabilities of a qualified subject ("red lantern") and of a
    value with letters; only the first `wordings` statement and question forms are drawn.
    """
    needles: list[Needle] = []
    subjects: set[str] = set()
    values: set[str] = set()
    while len(needles) < count:
        subject = rng.choice(NOUNS)
        if rng.random() < two_words:
            subject = f"{rng.choice(ADJECTIVES)} {subject}"
        value = draw_value(rng, letters=letters)
        if subject in subjects or value in values:
            continue
        subjects.add(subject)
        values.add(value)
        fields = {"subject": subject, "attribute": rng.choice(ATTRIBUTES), "value": value}
        needles.append(
            Needle(
                **fields,
                statement=rng.choice(STATEMENTS[:wordings]).format(**fields),
                question=rng.choice(QUESTIONS[:wordings]).format(**fields),
            )
        )
    return needles
