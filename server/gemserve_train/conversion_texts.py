"""The texts that a conversion fits an adapter on, without the prefix that precedes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.errors import AdapterError
from gemserve_train.data_files import check_chat, read_objects
from gemserve_train.examples import read_examples


@dataclass(frozen=True, slots=True)
class ConversionText:
    """A text that follows the prefix. The prefix replaces the first `num_lead` of `ids`.

    A chat begins with a BOS token whether or not a system prompt follows; that token is its lead.
    The answer starts at `num_prompt`. Two models are compared by their answers.
    """

    ids: tuple[int, ...]
    num_prompt: int
    num_lead: int = 0

    @property
    def after(self) -> tuple[int, ...]:
        """The tokens without the lead."""
        return self.ids[self.num_lead :]


def after_prefix(
    tokenizer: Any, path: Path, *, eos_id: int, max_tokens: int
) -> list[ConversionText]:
    """Prompts and completions, encoded as they follow the prefix in a request."""
    examples = read_examples(path, tokenizer, eos_id=eos_id, max_tokens=max_tokens)
    return [ConversionText(example.ids, example.num_prompt) for example in examples]


def after_text(
    tokenizer: Any, text: str, path: Path, *, max_tokens: int
) -> tuple[tuple[int, ...], list[ConversionText]]:
    """Token ids of the system prompt `text`, and the chats that follow it. See `after_messages`."""
    system = [{"role": "system", "content": text}]
    return after_messages(tokenizer, system, path, max_tokens=max_tokens)


def after_messages(
    tokenizer: Any, before: Sequence[dict[str, str]], path: Path, *, max_tokens: int
) -> tuple[tuple[int, ...], list[ConversionText]]:
    """Token ids of the messages `before` all chats of a file, and the chats without them.

    The lead of a chat is what the template writes before its first message: a system prompt, or a
    chat of examples, comes after the lead or in its place. Raises `AdapterError` if the template
    does not put the messages first.
    """
    if tokenizer.chat_template is None:
        raise AdapterError("--prompt: the model has no chat template; convert a prefix instead")
    texts: list[ConversionText] = []
    shared: tuple[int, ...] | None = None
    for number, fields in read_objects(path):
        try:
            messages = check_chat(fields.get("messages"))
        except ValueError as error:
            raise AdapterError(f"{path}: line {number}: {error}") from error
        if any(m["role"] in ("system", "developer") for m in messages):
            raise AdapterError(f"{path}: line {number}: has a system message besides the prompt")
        with_text = _rendered(tokenizer, [*before, *messages])
        alone = _rendered(tokenizer, messages)
        if len(alone) > max_tokens:
            raise AdapterError(
                f"{path}: line {number}: has {len(alone)} tokens, the limit is {max_tokens}"
            )
        num_same = _common_end(with_text, alone)
        head, lead = with_text[: len(with_text) - num_same], alone[: len(alone) - num_same]
        shared = shared or head
        if head != shared or len(head) <= len(lead):
            raise AdapterError(f"{path}: line {number}: its template puts the prompt elsewhere")
        prompt = _rendered(tokenizer, messages[:-1], add_generation_prompt=True)
        if alone[: len(prompt)] != prompt:
            raise AdapterError(f"{path}: line {number}: its template rewrites questions")
        texts.append(ConversionText(alone, len(prompt), len(lead)))
    if shared is None:
        raise AdapterError(f"{path}: has no chats, must have at least 1")
    return shared, texts


def _rendered(tokenizer: Any, messages: list[dict[str, str]], **options: bool) -> tuple[int, ...]:
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return tuple(ids)


def _common_end(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        count += 1
    return count
