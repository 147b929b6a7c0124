"""Messages through a model's chat template, and where each message stands in the result."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gemserve import bounded_jinja
from gemserve.errors import RequestError
from gemserve.prompting.stopping import Stopped, check_stopped
from gemserve.prompting.tools import Message, Tool

NO_VARIABLES: Mapping[str, Any] = {}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first one is the standard


class TemplateTooLarge(RequestError):
    """The chat template takes too long with these messages, or writes too much."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"messages: the model's chat template is stopped: {limit}", param="messages"
        )


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> str:
    """Messages through the model's chat template, which may read further `variables`.

    With `add_generation_prompt` the text goes up to where the answer begins. Pass `tools` only for
    a template that takes them. Templates see messages as transformers shows them. Raises
    `RequestError` if there is no template, or if it refuses the messages, and `TemplateTooLarge` if
    it takes too long or writes too much.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages: this model has no chat template; send a prompt (/v1/completions), or start "
            "it with a --chat-template",
            param="messages",
        )
    try:
        source = tokenizer.get_chat_template(None, list(tools) or None)
        shown = {
            **tokenizer.special_tokens_map,
            **variables,
            "messages": [_as_shown(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return bounded_jinja.render(source, shown, check_stopped)
    except bounded_jinja.TemplateLimit as error:
        raise TemplateTooLarge(str(error)) from error
    except Stopped:
        raise
    except Exception as error:  # templates raise whatever their author chose
        raise RequestError(
            f"messages: the model's chat template refuses them: {error}", param="messages"
        ) from error


def _as_shown(message: Message) -> Message:
    """A message without what is None, its reasoning by each of the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def find_messages(
    tokenizer: Any,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> list[tuple[int, int, int]]:
    """(index, start, end) of every message that the template shows, in characters of `text`.

    The template is rendered once more with a mark in place of each message. What stands between
    the marks is scaffolding, and it also stands between the messages in `text`, even where the
    template changed a message. Nothing is found if the template treats marks unlike messages.
    """
    nonce = f"{secrets.randbelow(10**20):020}"  # or a client could send the marks
    marks = [f"\ue000{nonce}:{i}\ue001" for i in range(len(messages))]
    # a template may show calls alone, if there is no content
    marked = [
        m if m.get("tool_calls") and not m["content"] else {**m, "content": mark}
        for m, mark in zip(messages, marks, strict=True)
    ]
    try:
        frame = render_chat(
            tokenizer,
            marked,
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
    except TemplateTooLarge:
        raise
    except RequestError:
        return []
    found = list(re.finditer(f"\ue000{nonce}:(\\d+)\ue001", frame))
    shown = [int(mark[1]) for mark in found]
    if len(shown) != len(set(shown)):  # a template that repeats messages
        return []
    ends = [0, *(mark.end() for mark in found)]
    starts = [*(mark.start() for mark in found), len(frame)]
    pieces = [frame[low:high] for low, high in zip(ends, starts, strict=True)]

    places: list[tuple[int, int, int]] = []
    if not shown or not text.startswith(pieces[0]):
        return places
    at = len(pieces[0])
    for i, after in zip(shown, pieces[1:], strict=True):
        end = _message_end(text, at, messages[i]["content"], after, is_last=i == shown[-1])
        if end < at:
            return []
        places.append((i, at, end))
        at = end + len(after)
    return places


def _message_end(text: str, at: int, content: str, after: str, *, is_last: bool) -> int:
    for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(variant + after, at):
            return at + len(variant)
    # the template has rewritten the message: it ends where the next scaffolding begins
    return len(text) - len(after) if is_last else text.find(after, at)
