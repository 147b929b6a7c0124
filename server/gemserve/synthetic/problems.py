"""Synthetic problems: facts to hide in a document, a question about them, and its answer.

They are the task families of RULER that need no download, in forms of our own: one value, all
values of one subject, the values of several subjects, assignments to follow, and the most common
words. The same generators train the built-in model and fill `gemserve eval`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from gemserve.synthetic.facts import QUESTIONS, STATEMENTS, draw_value
from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS

SEPARATOR = ", "


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Forms of statements and questions; `{subjects}` stands for several."""

    attributes: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value_statements: tuple[str, ...]
    value_questions: tuple[str, ...]
    query_questions: tuple[str, ...]


MANY_WORDINGS = Wording(
    attributes=ATTRIBUTES,
    statements=STATEMENTS,
    questions=QUESTIONS,
    value_statements=STATEMENTS[:7],
    value_questions=(
        "What are all the {attribute}s for the {subject}?",
        "List every {attribute} of the {subject}.",
        "What are all the special {attribute}s for {subject} mentioned in the text?",
    ),
    query_questions=(
        "What are the {attribute}s for {subjects}?",
        "List the {attribute}s of {subjects}.",
        "What are all the special {attribute}s for {subjects} mentioned in the text?",
    ),
)
RULER_WORDING = Wording(
    attributes=("magic number",),
    statements=STATEMENTS[6:7],
    questions=QUESTIONS[7:8],
    value_statements=STATEMENTS[6:7],
    value_questions=MANY_WORDINGS.value_questions[2:],
    query_questions=MANY_WORDINGS.query_questions[2:],
)

_TRACKING_QUESTIONS = (
    "Find all variables that are assigned the value {value} in the text above.",
    "Which variables have the value {value}?",
)
_COMMON_WORDS_QUESTIONS = (
    "What are the {count} most common words in the list above?",
    "Name the {count} words that appear most often.",
)
_NUMERALS = ("zero", "one", "two", "three", "four", "five")


@dataclass(frozen=True, slots=True)
class Answer:
    """One item of an answer, and its place: character `start` of statement `statement`.

    `statement_name_end`, `question_name_end`: the character after the subject's name in the
    statement and in the question; -1 if there is no such name.
    """

    text: str
    statement: int
    start: int
    statement_name_end: int = -1
    question_name_end: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Statements in the order that a document must have them, and a question about them.

    `kind`: the `ProblemMaker` method that drew it. `gold`: the statements that an answer needs.
    `answers` are in the order in which a reader would give them.
    """

    kind: str
    statements: tuple[str, ...]
    question: str
    answers: tuple[Answer, ...]
    gold: tuple[int, ...]

    @property
    def answer(self) -> str:
        return SEPARATOR.join(answer.text for answer in self.answers)


class ProblemMaker:
    """Draws problems for one document: no two of them share a subject or a value.

    `two_words`, `letters`, `words`: probabilities of a qualified subject, of a value with letters,
    and of a word for a value.
    """

    def __init__(
        self,
        rng: Random,
        *,
        two_words: float = 0.0,
        letters: float = 0.0,
        words: float = 0.0,
        wording: Wording = MANY_WORDINGS,
    ) -> None:
        self._rng = rng
        self._two_words, self._letters, self._words = two_words, letters, words
        self._wording = wording
        self._subjects: set[str] = set()
        self._values: set[str] = set()

    def single(self) -> Problem:
        """One fact. The question asks for its value."""
        fields = {
            "subject": self._subject(),
            "attribute": self._rng.choice(self._wording.attributes),
        }
        value = self._value()
        statement = self._rng.choice(self._wording.statements).format(value=value, **fields)
        question = self._rng.choice(self._wording.questions).format(**fields)
        statement_end, question_end = (
            _after(text, fields["subject"]) for text in (statement, question)
        )
        return Problem(
            kind="single",
            statements=(statement,),
            question=question,
            answers=(Answer(value, 0, statement.rindex(value), statement_end, question_end),),
            gold=(0,),
        )

    def multi_value(self, count: int) -> Problem:
        """`count` facts of one subject. The question asks for all values, in document order."""
        fields = {
            "subject": self._subject(),
            "attribute": self._rng.choice(self._wording.attributes),
        }
        values = [self._value() for _ in range(count)]
        form = self._rng.choice(self._wording.value_statements)
        statements = tuple(form.format(value=value, **fields) for value in values)
        question = self._rng.choice(self._wording.value_questions).format(**fields)
        statement_end, question_end = (
            _after(text, fields["subject"]) for text in (statements[0], question)
        )
        return Problem(
            kind="multi_value",
            statements=statements,
            question=question,
            answers=tuple(
                Answer(v, i, s.rindex(v), statement_end, question_end)
                for i, (v, s) in enumerate(zip(values, statements, strict=True))
            ),
            gold=tuple(range(count)),
        )

    def multi_query(self, count: int) -> Problem:
        """`count` facts of `count` subjects. The question asks for all values, in its own order."""
        attribute = self._rng.choice(self._wording.attributes)
        subjects = [self._subject() for _ in range(count)]
        values = [self._value() for _ in range(count)]
        statements = tuple(
            self._rng.choice(self._wording.statements).format(
                subject=subject, attribute=attribute, value=value
            )
            for subject, value in zip(subjects, values, strict=True)
        )
        question_order = self._rng.sample(range(count), count)
        names = [f"the {subjects[i]}" for i in question_order]
        subject_list = f"{', '.join(names[:-1])} and {names[-1]}"
        question = self._rng.choice(self._wording.query_questions).format(
            attribute=attribute, subjects=subject_list
        )
        ends = [len(", ".join(names[: k + 1])) for k in range(count - 1)] + [len(subject_list)]
        return Problem(
            kind="multi_query",
            statements=statements,
            question=question,
            answers=tuple(
                Answer(
                    values[i],
                    i,
                    statements[i].rindex(values[i]),
                    _after(statements[i], subjects[i]),
                    question.index(subject_list) + end,
                )
                for i, end in zip(question_order, ends, strict=True)
            ),
            gold=tuple(range(count)),
        )

    def tracking(self, hops: int, *, chains: int = 1) -> Problem:
        """Chains of `hops` assignments.

        The question asks which variables have one chain's value.
        """
        names = [[self._subject(1) for _ in range(hops + 1)] for _ in range(chains)]
        values = [self._value() for _ in range(chains)]
        statements: list[str] = []
        gold: list[int] = []
        hops_left = [list(range(hops + 1)) for _ in range(chains)]
        while any(hops_left):
            chain = self._rng.choice([c for c in range(chains) if hops_left[c]])
            hop = hops_left[chain].pop(0)
            source = values[chain] if hop == 0 else f"VAR {names[chain][hop - 1]}"
            if chain == 0:
                gold.append(len(statements))
            statements.append(f"VAR {names[chain][hop]} = {source}.")
        return Problem(
            kind="tracking",
            statements=tuple(statements),
            question=self._rng.choice(_TRACKING_QUESTIONS).format(value=values[0]),
            answers=tuple(
                Answer(name, at, len("VAR ")) for name, at in zip(names[0], gold, strict=True)
            ),
            gold=tuple(gold),
        )

    def common_words(
        self, num_words: int, *, count: int, common_share: float, decay: float
    ) -> Problem:
        """A list of `num_words` words. The question asks for its `count` most frequent ones.

        These make up `common_share` of the list, each `decay` times as frequent as the one before.
        Every other word is at most half as frequent as any of them.
        """
        nouns = self._rng.sample(NOUNS, len(NOUNS))
        weights = [decay**i for i in range(count)]
        shares = [common_share * w / sum(weights) for w in weights]
        numbers = [max(2, round(s * num_words)) for s in shares]
        for i in range(count - 2, -1, -1):
            numbers[i] = max(numbers[i], numbers[i + 1] + 1)
        rest = max(0, num_words - sum(numbers))
        limit = max(1, numbers[-1] // 2)
        words = [word for word, n in zip(nouns, numbers, strict=False) for _ in range(n)]
        others = [word for word in nouns[count:] for _ in range(limit)]
        self._rng.shuffle(others)
        words += others[:rest]
        self._rng.shuffle(words)
        return Problem(
            kind="common_words",
            statements=(" ".join(words),),
            question=self._rng.choice(_COMMON_WORDS_QUESTIONS).format(count=_NUMERALS[count]),
            answers=tuple(Answer(word, 0, -1) for word in nouns[:count]),
            gold=(),
        )

    def _subject(self, max_words: int = 2) -> str:
        while True:
            subject = self._rng.choice(NOUNS)
            if max_words > 1 and self._rng.random() < self._two_words:
                subject = f"{self._rng.choice(ADJECTIVES)} {subject}"
            if subject not in self._subjects:
                self._subjects.add(subject)
                return subject

    def _value(self) -> str:
        if self._words and self._rng.random() < self._words:
            return self._subject(1)
        while True:
            value = draw_value(self._rng, letters=self._letters)
            if value not in self._values:
                self._values.add(value)
                return value


def _after(text: str, phrase: str) -> int:
    """The end of the last occurrence of a phrase, in whole words."""
    return [match.end() for match in re.finditer(rf"\b{re.escape(phrase)}\b", text)][-1]
