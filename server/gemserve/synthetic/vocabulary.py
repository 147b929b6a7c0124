"""What a vocabulary of natural facts consists of: relations, their wordings, subjects and values.

A vocabulary has wordings, subjects and values of its own, so that what was tuned on one can be
measured on another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

Kind = Literal["place", "person", "number", "clause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Facts of one sort: `{s}` is the subject in statements and questions, `{v}` the value.

    A value is what a right answer has to contain, word for word.
    """

    kind: Kind
    subjects: tuple[str, ...]
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


Vocabulary = tuple[Relation, ...]


def split(text: str) -> tuple[str, ...]:
    """The entries of a list whose separators are commas."""
    return tuple(" ".join(entry.split()) for entry in text.split(","))


def full_names(first_names: str, last_names: str) -> tuple[str, ...]:
    """Every first name with every last name."""
    return tuple(" ".join(pair) for pair in product(split(first_names), split(last_names)))


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one vocabulary: those that leave `remainder` when they are divided by three.

    So no two vocabularies with different remainders share a number or a time of day.
    """

    remainder: int

    def times(self) -> tuple[str, ...]:
        """Times of day such as "7:40", from five in the morning to eleven in the evening."""
        return tuple(f"{m // 60}:{m % 60:02}" for m in self._among(5 * 60, 23 * 60))

    def between(self, low: int, high: int) -> tuple[str, ...]:
        """The numbers from `low` up to but not including `high`."""
        return tuple(str(number) for number in self._among(low, high))

    def _among(self, low: int, high: int) -> range:
        return range(low + (self.remainder - low) % 3, high, 3)


def load_vocabulary(name: str) -> Vocabulary:
    """The vocabulary of a file beside this one.

    `values` of a relation are entries, the name of one of the file's `lists` (a pair of them are
    first and last names), "times", or a pair of numbers.
    """
    text = Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")
    given: dict[str, Any] = json.loads(text)
    numbers = Numbers(given["numbers"])
    lists = {"times": numbers.times()}
    for key, value in given["lists"].items():
        lists[key] = split(value) if isinstance(value, str) else full_names(*value)

    def values_of(values: str | list[int]) -> tuple[str, ...]:
        if isinstance(values, list):
            return numbers.between(*values)
        return lists.get(values) or split(values)

    return tuple(
        Relation(
            kind=each["kind"],
            subjects=split(each["subjects"]),
            values=values_of(each["values"]),
            statements=tuple(each["statements"]),
            questions=tuple(each["questions"]),
        )
        for each in given["relations"]
    )
