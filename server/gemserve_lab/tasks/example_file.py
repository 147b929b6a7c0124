"""Examples that are read from files, one a line, each at its own length.

All outcomes of a file are averaged in one row, whose `prompt_tokens` is the mean of the lengths. A
stored outcome is found again by its line, its length and the file's digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw, find_spans, question_prompt
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.prompting.prompt import Prompt, text_prompt
from gemserve_lab.tasks.jsonl_records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class FileExample:
    """One line of a file, as text.

    The prompt is `document`, then `task`: through the chat template with a blank line between them,
    or joined as they are if not `is_chat`. `question` is the part of the task that passages are
    ranked by. `gold`: passages of the document that hold the answer, in order; empty if not known.
    """

    document: str
    task: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    labels: tuple[str, ...] = ()
    gold: tuple[str, ...] = ()
    is_chat: bool = True
    is_one_line: bool = False

    def prompt(self, tokenizer: Any) -> Prompt:
        if self.is_chat:
            return question_prompt(tokenizer, self.document, self.task)
        return text_prompt(tokenizer, self.document + self.task)

    def find_gold(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        """Token ranges of `gold`. Raises `ValueError` if the template changes the document."""
        if not self.gold:
            return ()
        # the template's text before the document may have the same words
        document = prompt.text.index(self.document.strip())
        return find_spans(prompt, self.gold, document)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFile:
    """The cases of one file by their lines, in order."""

    subtask: str
    path: Path
    digest: str
    cases: Mapping[int, FileExample]

    def first(self, count: int | None) -> ExampleFile:
        """Only the first `count` cases; all, if None."""
        return replace(self, cases=dict(islice(self.cases.items(), count)))

    def make(self, tokenizer: Any, draw: ExampleDraw) -> Example:
        """The example at line `draw.index`. Raises `ConfigError` if its gold cannot be found."""
        case = self.cases[draw.index]
        prompt = case.prompt(tokenizer)
        try:
            gold = case.find_gold(prompt)
        except ValueError as error:
            raise ConfigError(
                f"{self.path}, line {draw.index}: gold: the model's chat template changes the "
                "context, so that its passages cannot be found in the prompt"
            ) from error
        return Example(
            subtask=self.subtask,
            num_tokens=draw.num_tokens,
            index=draw.index,
            prompt=prompt,
            question=case.question,
            answers=case.answers,
            gold=gold,
            metric=case.metric,
            max_tokens=case.max_tokens,
            labels=case.labels,
            is_one_line=case.is_one_line,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """A line whose prompt leaves no room for the answer, in the model or its KV memory."""

    path: Path
    line: int
    tokens: int
    limit: int
    max_tokens: int


def measure(core: Core, file: ExampleFile, seed: int) -> tuple[list[ExampleDraw], list[TooLong]]:
    """The lines that fit, each at its real length, and the lines that are too long."""
    draws: list[ExampleDraw] = []
    refused: list[TooLong] = []
    longest = core.config.max_prompt_tokens
    for line, case in file.cases.items():
        num_tokens = len(case.prompt(core.tokenizer).ids)
        limit = min(longest, core.longest_sequence - case.max_tokens)
        if num_tokens > limit:
            refused.append(
                TooLong(
                    path=file.path,
                    line=line,
                    tokens=num_tokens,
                    limit=limit,
                    max_tokens=case.max_tokens,
                )
            )
        else:
            draws.append(ExampleDraw(seed=seed, num_tokens=num_tokens, index=line, samples=1))
    return draws, refused


def read_answers(record: Record, metric: str) -> tuple[str, ...]:
    """A line's `answers`. Raises `ConfigError` if `metric` cannot compare with them."""
    answers = record.texts("answers")
    if metric == "number" and not all(len(find_numbers(answer)) == 1 for answer in answers):
        raise record.error(
            "answers", "must have one run of digits in each, such as 1250, for metric number"
        )
    return answers


def find_numbers(text: str) -> list[str]:
    """All runs of digits, as they are written: 1,250 and 3.5 have two."""
    return re.findall(r"\d+", text)


def check_gold(files: Iterable[ExampleFile]) -> None:
    """Raise `ConfigError` for the first line that does not say where its answer is."""
    for file in files:
        for line, case in file.cases.items():
            if not case.gold:
                raise ConfigError(
                    f"methods=oracle: {file.path}, line {line} does not say where in its context "
                    "the answer is; it has no gold"
                )
