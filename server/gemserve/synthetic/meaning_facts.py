"""Facts that are asked for in other words: question and fact share no content word.

Each has a decoy, a sentence about another matter that has words of the question: what a search for
words finds instead. Vocabularies share no fact, name or answer, so that what was chosen on one can
be confirmed on the second and measured on the third. There are facts in English prose, in code, in
tables, and in other languages. The files are in the folder `meaning`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from gemserve.synthetic.natural_facts import VocabularyName

# How a question's words differ from those of the fact in English prose: by synonyms, by the other
# side of a relation, by an effect for its cause, by a class for its member, or by a noun that only
# stands in the sentence before.
ProseKind = Literal["synonym", "inverse", "cause", "member", "pronoun"]
MeaningKind = ProseKind | Literal["code", "table", "language"]
PROSE_KINDS: tuple[ProseKind, ...] = get_args(ProseKind)
MEANING_KINDS: tuple[MeaningKind, ...] = (*PROSE_KINDS, "code", "table", "language")

_FOLDER = Path(__file__).parent / "meaning"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeaningFact:
    """A fact, and a question about it in other words.

    `gold`: the part of `fact` that the question needs, a row of a table or all of it. `answer`: a
    part of `gold`. `decoy`: see the module's docstring.
    """

    kind: MeaningKind
    fact: str
    gold: str
    question: str
    answer: str
    decoy: str


@lru_cache(maxsize=4)
def _file(name: str) -> Any:
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@lru_cache(maxsize=8)
def meaning_facts(vocabulary: VocabularyName) -> tuple[MeaningFact, ...]:
    """The facts of one vocabulary in English prose, code and tables."""
    return tuple(_fact(entry, entry["kind"]) for entry in _file(vocabulary))


def languages_of(vocabulary: VocabularyName) -> tuple[str, ...]:
    """The languages other than English in which a vocabulary has facts."""
    return tuple(name for name, entry in _file("languages").items() if entry.get(vocabulary))


def facts_in(language: str, vocabulary: VocabularyName) -> tuple[MeaningFact, ...]:
    """The facts of one vocabulary in a language other than English."""
    return tuple(_fact(entry, "language") for entry in _file("languages")[language][vocabulary])


def filler_in(language: str) -> tuple[str, ...]:
    """Sentences in a language other than English, which have nothing to do with its facts."""
    return tuple(_file("languages")[language]["filler"])


def _fact(entry: dict[str, str], kind: MeaningKind) -> MeaningFact:
    return MeaningFact(
        kind=kind,
        fact=entry["fact"],
        gold=entry.get("gold", entry["fact"]),
        question=entry["question"],
        answer=entry["answer"],
        decoy=entry["decoy"],
    )
