"""Training examples: a file of prompts and completions, as token ids and labels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemserve.errors import AdapterError, ConfigError
from gemserve_train.data_files import check_chat, check_text, read_objects

IGNORED = -100  # the label of tokens that do not count in the loss


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """`ids` has prompt, completion and end token. The first `num_prompt` are not trained on."""

    ids: tuple[int, ...]
    num_prompt: int


def end_token(tokenizer: Any, eos_ids: Collection[int]) -> int:
    """The token behind an answer: the tokenizer's own, if it is among the model's.

    A model may end at others, too, such as the end of a text that no chat has. Raises `ConfigError`
    if it names none.
    """
    if not eos_ids:
        raise ConfigError("the model names no token that ends an answer")
    named: int = tokenizer.eos_token_id  # or None, which is none of them
    return named if named in eos_ids else min(eos_ids)


def read_examples(
    path: Path, tokenizer: Any, *, eos_id: int, max_tokens: int
) -> list[TrainingExample]:
    """One JSON object a line: `{"prompt", "completion"}`, or `{"messages"}` ending in an answer.

    Raises `AdapterError` naming the line that is wrong or longer than `max_tokens`.
    """
    examples: list[TrainingExample] = []
    for number, fields in read_objects(path):
        try:
            prompt, completion = _parts(tokenizer, fields)
        except ValueError as error:
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


def pack(examples: Sequence[TrainingExample]) -> dict[str, torch.Tensor]:
    """One row of all examples: `input_ids` and `labels`, [1, tokens], and `layout`.

    What all prompts begin with is in the row once, before the rest of each example. `layout` has
    the number of these tokens, and then that of each example's others: see `forward.Layout`.
    """
    shared = num_shared(examples)
    ids, labels = list(examples[0].ids[:shared]), [IGNORED] * shared
    for example in examples:
        ids += example.ids[shared:]
        labels += [IGNORED] * (example.num_prompt - shared) + list(
            example.ids[example.num_prompt :]
        )
    lengths = [len(example.ids) - shared for example in examples]
    return {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "layout": torch.tensor([shared, *lengths]),
    }


def num_shared(examples: Sequence[TrainingExample]) -> int:
    """How many tokens all prompts begin with. Each prompt keeps a token of its own, at least."""
    if len(examples) == 1:
        return 0
    limit = max(0, min(example.num_prompt for example in examples) - 1)
    columns = zip(*(example.ids[:limit] for example in examples), strict=True)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), limit)


def _parts(tokenizer: Any, fields: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer. Raises `ValueError`."""
    if fields.keys() == {"messages"}:
        *before, answer = check_chat(fields["messages"])
        completion = answer["content"]
        prompt = tokenizer.apply_chat_template(
            before, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif fields.keys() == {"prompt", "completion"}:
        completion = check_text("completion", fields["completion"])
        prompt = tokenizer(check_text("prompt", fields["prompt"])).input_ids
    else:
        raise ValueError(
            f"fields {', '.join(sorted(map(str, fields)))}: must be prompt and completion, or "
            "messages"
        )
    return list(prompt), list(tokenizer(completion, add_special_tokens=False).input_ids)
