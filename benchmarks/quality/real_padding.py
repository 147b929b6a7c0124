"""The questions about real documents as examples, alone or amid other documents of the machine.

What stands around a context comes from documents of other kinds than its own: a licence that says
nearly the same as the one in question would make the question ambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.quality import real_documents as real
from gemserve.calibration.search.example import Example, ExampleDraw, question_prompt
from gemserve_lab.tasks.example_file import ExampleFile
from gemserve_lab.tasks.jsonl import read_case
from gemserve_lab.tasks.jsonl_records import Record

HELD_OUT = "held_out"  # the task that asks the held-out questions
PLACES = 5  # how many shares of the padding there are before a context: 0, 1/4, 1/2, 3/4 and 1


def question_file(task: str) -> Path:
    return real.HELD_OUT if task == HELD_OUT else real.QUESTIONS


@cache
def questions(task: str = "real") -> tuple[tuple[str, dict[str, Any]], ...]:
    """The source and the line of each question of a task that can be asked here."""
    lines, _ = real.make_lines(real.read_questions(question_file(task)))
    return tuple(lines)


def make_example(tokenizer: Any, subtask: str, index: int, num_tokens: int) -> Example:
    """Question `index`, with padding to about `num_tokens` tokens; 0: without padding."""
    source, line = questions(subtask)[index]
    if num_tokens:
        bare = question_prompt(tokenizer, line["context"], line["question"])
        room = max(0, num_tokens - len(bare.ids))
        line = line | {"context": pad(tokenizer, source, line, index, room)}
    record = Record(Path(question_file(subtask).name), index, line)
    file = ExampleFile(
        subtask=subtask, path=record.path, digest="", cases={index: read_case(record)}
    )
    draw = ExampleDraw(seed=0, num_tokens=num_tokens, index=index, samples=1)
    return file.make(tokenizer, draw)


def pad(tokenizer: Any, source: str, line: dict[str, Any], index: int, room: int) -> str:
    """The line's context with paragraphs of other documents before and after it.

    Consecutive paragraphs, at most `room` tokens of them; the share before the context follows
    from the question's number.
    """
    others = _others(tokenizer, source, index)
    before = _take(others, round(room * (index % PLACES) / (PLACES - 1)), line["gold"])
    after = _take(others, room - round(room * (index % PLACES) / (PLACES - 1)), line["gold"])
    return "\n\n".join([*before, line["context"], *after])


def _take(paragraphs: Iterator[tuple[str, int]], room: int, gold: str) -> list[str]:
    taken: list[str] = []
    for text, num_tokens in paragraphs:
        if num_tokens > room:
            break
        if gold not in text:
            taken.append(text)
            room -= num_tokens
    return taken


def _others(tokenizer: Any, source: str, index: int) -> Iterator[tuple[str, int]]:
    """Paragraphs of all documents of other kinds, from another one on for each question."""
    kind = source.partition("/")[0]
    names = [name for name in _sources() if name.partition("/")[0] != kind]
    at = index % len(names)
    for name in (*names[at:], *names[:at]):
        yield from _paragraphs(tokenizer, name)


@cache
def _sources() -> tuple[str, ...]:
    return tuple(dict.fromkeys(source for source, _ in questions()))


_counted: dict[str, list[tuple[str, int]]] = {}


def _paragraphs(tokenizer: Any, source: str) -> list[tuple[str, int]]:
    """The paragraphs of a document, and their tokens with the blank line behind them."""
    if source not in _counted:
        text = real.read_document(source)
        parts = [text[p.start : p.stop] for p in real.split_paragraphs(text)]
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [part + "\n\n" for part in parts], add_special_tokens=False
        )
        _counted[source] = [(p, len(e.ids)) for p, e in zip(parts, encoded, strict=True)]
    return _counted[source]
