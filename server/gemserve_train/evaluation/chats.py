"""Questions of a file of chats, as token ids, with examples before them or without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from gemserve.adapters.prefix import Prefix
from gemserve.errors import AdapterError
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.data_files import read_objects
from gemserve_train.examples import TrainingExample, num_shared, read_examples
from gemserve_train.parameters import read_prefix


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the file: the chat up to the answer, or a prompt, and the expected answer."""

    example: TrainingExample
    expected: str


def read_questions(
    path: Path,
    tokenizer: Any,
    eos_id: int,
    *,
    shots: Sequence[list[dict[str, str]]] = (),
    limit: int | None = None,
    max_tokens: int,
) -> list[Question]:
    """The first `limit` lines of a file in the form that training takes.

    `shots`: chats that come before each question, after its system message. Raises `AdapterError`
    naming the line that is wrong, has no room for shots, or is longer than `max_tokens`.
    """
    lines: list[dict[str, Any]] = []
    for number, fields in read_objects(path):
        if limit is not None and len(lines) == limit:
            break
        if shots and "messages" not in fields:
            raise AdapterError(f"{path}: line {number}: only chats (messages) can follow examples")
        lines.append({"messages": _after(shots, fields["messages"])} if shots else fields)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            examples = read_examples(copy, tokenizer, eos_id=eos_id, max_tokens=max_tokens)
        except AdapterError as error:
            raise AdapterError(str(error).replace(str(copy), str(path))) from error
    expected = [
        line["messages"][-1]["content"] if "messages" in line else line["completion"]
        for line in lines
    ]
    return [Question(e, text) for e, text in zip(examples, expected, strict=True)]


def _after(shots: Sequence[list[dict[str, str]]], messages: Any) -> Any:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return messages  # the reader says what is wrong
    lead = 1 if messages and messages[0].get("role") == "system" else 0
    turns = [turn for shot in shots for turn in shot if turn["role"] != "system"]
    return [*messages[:lead], *turns, *messages[lead:]]


def draw_shots(path: Path, count: int, seed: int) -> list[list[dict[str, str]]]:
    """`count` chats of a file, drawn by `seed`. Raises `AdapterError` if it has fewer."""
    chats = [fields["messages"] for _, fields in read_objects(path) if "messages" in fields]
    if len(chats) < count:
        raise AdapterError(f"{path}: has {len(chats)} chats, {count} are asked for")
    return Random(seed).sample(chats, count)


def behind_prefix(
    model: CausalModel, questions: Sequence[Question]
) -> tuple[Prefix | None, list[Question]]:
    """What all prompts begin with as a prefix that is read once, and the rest of each.

    The answers are the same as without it. There is no prefix for models with a sliding window, or
    whose rotary embedding depends on length.
    """
    shared = num_shared([question.example for question in questions])
    is_windowed = any(window is not None for window in model.sliding_windows)
    if shared == 0 or is_windowed or not model.is_rope_fixed:
        return None, list(questions)
    keys, values = read_prefix(model, questions[0].example.ids[:shared])
    rest = [
        Question(TrainingExample(q.example.ids[shared:], q.example.num_prompt - shared), q.expected)
        for q in questions
    ]
    return Prefix("", "", keys=keys, values=values), rest
