"""From text or messages to token ids, with the spans a filter should keep."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.errors import RequestError
from gemserve.filtering.spans import plain_spans, question_spans
from gemserve.types import Priority, Span


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model sees them, and the spans worth protecting.

    `offsets`: each token's half-open character range in `text`; empty for a prompt of ids.
    """

    ids: Sequence[int]
    protected: tuple[Span, ...]
    text: str = ""
    offsets: Sequence[tuple[int, int]] = ()


def ids_prompt(tokenizer: Any, ids: Sequence[int]) -> Prompt:
    """A prompt of token ids, taken unaltered."""
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    return Prompt(ids, plain_spans(len(ids), has_bos))


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    """A plain prompt, with the special tokens the tokenizer adds (BOS)."""
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=True)
    return Prompt(
        encoding.ids, ids_prompt(tokenizer, encoding.ids).protected, text, encoding.offsets
    )


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Prompt:
    """Messages through the model's chat template, ready for the answer.

    Raises `RequestError` if there is no template or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages: this model has no chat template; use /v1/completions", param="messages"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise whatever their author chose
        raise RequestError(
            f"messages: the model's chat template refuses them: {error}", param="messages"
        ) from error
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    spans = chat_spans(text, messages, encoding.offsets)
    return Prompt(encoding.ids, spans, text, encoding.offsets)


def chat_spans(
    text: str, messages: Sequence[dict[str, str]], offsets: Sequence[tuple[int, int]]
) -> tuple[Span, ...]:
    """Protected token spans of a rendered chat: everything but the long middle of what was said.

    Template scaffolding, system and tool messages, and the last user turn (its ends, if it is the
    document itself). A template that rewrites a message leaves it unprotected.
    """
    starts = [low for low, _ in offsets]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    spans: list[Span] = [Span(0, 1, Priority.BOS)]
    cursor_char, cursor_token = 0, 0
    for index, message in enumerate(messages):
        content = message["content"].strip()
        at = text.find(content, cursor_char) if content else -1
        if at < 0:
            continue
        cursor_char = at + len(content)
        start, stop = bisect_left(starts, at), bisect_left(starts, cursor_char)
        spans.append(Span(cursor_token, start, Priority.REST))  # scaffolding before the message
        if message["role"] in ("system", "developer"):
            spans.append(Span(start, stop, Priority.SYSTEM))
        elif message["role"] == "tool":
            spans.append(Span(start, stop, Priority.TOOLS))
        elif index == last_user:
            spans += question_spans(start, stop)
        cursor_token = stop
    spans.append(Span(cursor_token, len(offsets), Priority.QUESTION))  # the answer's header
    return tuple(s for s in spans if s.stop > s.start)
