"""An example: a prompt, the expected answer, and the tokens that the answer needs."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from gemserve.prompting.prompt import Prompt, chat_prompt, text_prompt
from gemserve.synthetic.problems import Problem

# A digit and a sign that continues its number; a comma only if it separates thousands.
_NO_NUMBER_BEFORE = r"(?<![0-9][.:])(?<![0-9],(?=[0-9]{3}(?![0-9])))"
_NO_NUMBER_AFTER = r"(?![.:][0-9]|,[0-9]{3}(?![0-9]))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question with its document, as the model reads it.

    `num_tokens`: the nominal length. `answers`: what the metric compares with. `gold`: half-open
    token ranges that hold the answer; empty if no part of the document can be left out. `depth`:
    where a single fact is, 0 (start) to 1 (end). `is_one_line`: only the first line of an answer
    counts. `document`: the document's text, if a task made it. `linked`: those of `gold` that share
    no name with the question.
    """

    subtask: str
    num_tokens: int
    index: int
    prompt: Prompt
    question: str
    answers: tuple[str, ...]
    gold: tuple[tuple[int, int], ...] = ()
    depth: float | None = None
    metric: str = "contains"
    max_tokens: int = 48
    labels: tuple[str, ...] = ()  # labels of a classification
    is_one_line: bool = False
    document: str = ""
    linked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDraw:
    """Which of the `samples` examples of one length this is. It determines everything random."""

    seed: int
    num_tokens: int
    index: int
    samples: int

    def rng(self, name: str) -> Random:
        return Random(f"{name} {self.seed} {self.num_tokens} {self.index}")

    @property
    def depth(self) -> float:
        """Depths are spread evenly over the samples, from the document's start to its end."""
        return self.index / max(1, self.samples - 1)


# Draws one example of a subtask with a model's tokenizer.
Maker = Callable[[Any, ExampleDraw], Example]
Subtasks = Mapping[str, Maker]


def with_metric(maker: Maker, metric: str) -> Maker:
    """Examples that are scored by another metric."""
    return lambda tokenizer, draw: replace(maker(tokenizer, draw), metric=metric)


def make_example(
    tokenizer: Any,
    subtask: str,
    draw: ExampleDraw,
    *,
    document: str,
    problem: Problem,
    depth: float | None = None,
    is_question_first: bool = False,
    max_tokens: int = 48,
) -> Example:
    """Join document and question by the chat template, or plainly if the model has none."""
    parts = document, problem.question
    prompt = question_prompt(tokenizer, *(reversed(parts) if is_question_first else parts))
    return Example(
        subtask=subtask,
        num_tokens=draw.num_tokens,
        index=draw.index,
        prompt=prompt,
        question=problem.question,
        answers=tuple(answer.text for answer in problem.answers),
        gold=find_spans(prompt, [problem.statements[i] for i in problem.gold]),
        depth=depth,
        metric="contains",
        max_tokens=max_tokens,
        document=document,
    )


def question_prompt(tokenizer: Any, document: str, question: str) -> Prompt:
    """The document and then the question, ready for the answer."""
    content = f"{document}\n\n{question}"
    if tokenizer.chat_template is None:
        return text_prompt(tokenizer, f"{content}\nAnswer:")
    return chat_prompt(tokenizer, [{"role": "user", "content": content}])


def find_spans(
    prompt: Prompt, passages: Sequence[str], start: int = 0
) -> tuple[tuple[int, int], ...]:
    """Token ranges of passages that follow each other in the prompt, from character `start` on.

    Raises `ValueError` if it lacks one of them.
    """
    if not passages:
        return ()
    starts = [low for low, _ in prompt.offsets]
    ends = [high for _, high in prompt.offsets]
    spans: list[tuple[int, int]] = []
    at = start
    for passage in passages:
        at = prompt.text.index(passage, at)
        stop = at + len(passage)
        spans.append((bisect_right(ends, at), bisect_left(starts, stop)))
        at = stop
    return tuple(spans)


def contains(text: str, example: Example) -> float:
    """1 if the text contains every expected answer, whatever else it says: RULER's rule.

    Case and white space do not count. An answer must not be part of a longer word or number: 482 is
    not in 48213, nor in 4.82, 1,482 and 4:82.
    """
    given = _fold(text)
    return float(all(_is_in(_fold(answer), given) for answer in example.answers))


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())


def _is_in(answer: str, text: str) -> bool:
    start = _NO_NUMBER_BEFORE if answer[:1].isdigit() else ""
    stop = _NO_NUMBER_AFTER if answer[-1:].isdigit() else ""
    before = "(?<![0-9a-z])" if answer[:1].isalnum() else ""
    after = "(?![0-9a-z])" if answer[-1:].isalnum() else ""
    return re.search(before + start + re.escape(answer) + stop + after, text) is not None


def recall(gold: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> float | None:
    """The share of the tokens of `gold` that are in `kept`; None: there are none."""
    total = sum(stop - start for start, stop in gold)
    if total == 0:
        return None
    kept_gold = sum(
        max(0, min(stop, g_stop) - max(start, g_start))
        for g_start, g_stop in gold
        for start, stop in kept
    )
    return kept_gold / total
