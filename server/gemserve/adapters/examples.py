"""Training examples: a file of prompts and completions, as token ids and labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemserve.adapters.trainable import IGNORED
from gemserve.errors import AdapterError


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """`ids`: prompt, completion and end token; the first `num_prompt` are not trained on."""

    ids: tuple[int, ...]
    num_prompt: int


def read_examples(
    path: Path, tokenizer: Any, *, eos_id: int, max_tokens: int
) -> list[TrainingExample]:
    """One JSON object a line: `{"prompt", "completion"}`, or `{"messages"}` ending in an answer.

    Raises `AdapterError` naming the line that is wrong or longer than `max_tokens`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    examples: list[TrainingExample] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt, completion = _parts(tokenizer, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise AdapterError(f"{path}: line {number}: {error}") from error
        ids = (*prompt, *completion, eos_id)
        if len(ids) > max_tokens:
            raise AdapterError(
                f"{path}: line {number}: has {len(ids)} tokens, the limit is {max_tokens}"
            )
        examples.append(TrainingExample(ids, len(prompt)))
    if not examples:
        raise AdapterError(f"{path}: has no examples, must have at least 1")
    return examples


def collate(examples: Sequence[TrainingExample], pad_id: int) -> dict[str, torch.Tensor]:
    """Padded on the right: `input_ids` and `labels`, [batch, tokens]."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad_id)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, example.num_prompt : len(tokens)] = tokens[example.num_prompt :]
    return {"input_ids": ids, "labels": labels}


def _parts(tokenizer: Any, line: Any) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer. Raises `ValueError`."""
    if not isinstance(line, dict):
        raise ValueError("must be an object")
    if line.keys() == {"messages"}:
        *before, answer = line["messages"]
        if answer["role"] != "assistant" or not before:
            raise ValueError("messages: must end in an assistant's answer to others")
        completion = answer["content"]
        prompt = tokenizer.apply_chat_template(
            before, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif line.keys() == {"prompt", "completion"}:
        completion, text = line["completion"], line["prompt"]
        if not isinstance(text, str):
            raise ValueError("prompt: must be a text")
        prompt = tokenizer(text).input_ids
    else:
        raise ValueError(
            f"fields {', '.join(sorted(map(str, line)))}: must be prompt and completion, or "
            "messages"
        )
    if not isinstance(completion, str) or not completion:
        raise ValueError("completion: must be a text, and not empty")
    if not prompt:
        raise ValueError("prompt: must not be empty")
    return list(prompt), list(tokenizer(completion, add_special_tokens=False).input_ids)
