"""Which tokens of a rendered chat are instructions, tools, calls, requests and documents.

It looks for the messages in the rendered text by itself, and asks nothing of the code that chooses
what a filter protects: so it can check that code. Where a message stands is found as a diff tool
would: the chat is rendered once more with a mark in place of every text, and what stands between
the marks is the template's own text, the tools and the calls.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemserve.api.requests.chat_body import Message, Tool
from gemserve.config import ModelConfig
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve.prompting.chat_template import render_chat
from gemserve.prompting.prompt import Prompt, chat_prompt
from gemserve.prompting.template_roles import fit_roles
from gemserve.prompting.tools import for_template

Ranges = Sequence[tuple[int, int]]
# Roles of a prompt's parts. What is under `KEPT_WHOLE` must be read whatever a filter chooses.
KEPT_WHOLE = ("system", "tools", "calls", "template", "request")
ROLES = (
    *KEPT_WHOLE,
    "reminder",
    "long turn",
    "old user",
    "old reminder",
    "assistant",
    "result",
    "blank",
)
LONGEST_REQUEST = 1024  # characters of a last user turn that is taken for a request as a whole
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages and tools in OpenAI's form.

    `requests`: the parts of the last user turn that say what is wanted. If there are none, the
    turn is a request as a whole, unless it is longer than `LONGEST_REQUEST`. `recorded`: the path
    and the body that an agent has sent, if the chat is one.
    """

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    requests: tuple[str, ...] = ()
    recorded: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens start..stop−1 of a prompt. `message`: an index; None if they belong to none."""

    role: str
    message: int | None
    start: int
    stop: int


def load_tokenizer(model: str) -> Any:
    return open_checkpoint(ModelConfig(model=model)).load_tokenizer()


def render(tokenizer: Any, chat: Chat) -> Prompt:
    """The chat as a server would read it."""
    messages, tools = _plain(chat)
    return chat_prompt(tokenizer, messages, tools=tools)


def find_parts(tokenizer: Any, chat: Chat, prompt: Prompt) -> list[Part]:
    """All parts of the rendered chat in their order. They cover every token once.

    A token that stands in two parts belongs to the one that must be kept.
    """
    texts = _find_texts(tokenizer, chat, prompt.text)
    starts = [low for low, _ in prompt.offsets]
    ends = [high for _, high in prompt.offsets]
    parts: list[Part] = []
    at = 0
    for index, (role, message, _, high) in enumerate(texts):
        is_last = index == len(texts) - 1
        is_kept = role in KEPT_WHOLE
        stop = bisect_left(starts, high) if is_kept else bisect_right(ends, high)
        stop = len(starts) if is_last else max(at, stop)
        if stop > at:
            parts.append(Part(role=role, message=message, start=at, stop=stop))
        at = stop
    return parts


def count_kept(parts: Sequence[Part], kept: Ranges) -> list[int]:
    """How many tokens of each part are in the ranges, which are ascending and do not overlap."""
    starts, stops = [low for low, _ in kept], [high for _, high in kept]

    def before(position: int) -> int:
        index = bisect_left(starts, position)
        total = sum(stops[:index]) - sum(starts[:index])
        return total - max(0, stops[index - 1] - position) if index else 0

    return [before(part.stop) - before(part.start) for part in parts]


def find_text(prompt: Prompt, text: str, start: int = 0) -> tuple[int, int]:
    """The tokens that a text stands in, from a character of the prompt on.

    Raises `ValueError` if the prompt lacks it.
    """
    low = prompt.text.index(text, start)
    starts = [at for at, _ in prompt.offsets]
    ends = [at for _, at in prompt.offsets]
    return bisect_right(ends, low), bisect_left(starts, low + len(text))


def lost_text(prompt: Prompt, part: Part, kept: Ranges, most: int = 200) -> str:
    """The beginning of what a part lacks."""
    inside = {at for low, high in kept for at in range(low, high)}
    gone = [at for at in range(part.start, part.stop) if at not in inside]
    pieces = [prompt.text[slice(*prompt.offsets[at])] for at in gone[:most]]
    return "".join(pieces)[:most]


def _plain(chat: Chat) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools in the form of chat templates, validated as a server does it."""
    messages = [Message.model_validate(message).plain for message in chat.messages]
    return messages, [Tool.model_validate(tool).plain for tool in chat.tools]


def _find_texts(tokenizer: Any, chat: Chat, text: str) -> list[tuple[str, int | None, int, int]]:
    """(role, message, start, end) of every part, in characters of the rendered chat."""
    messages, tools = _plain(chat)
    marks = [f"\ue000part:{i}\ue001" for i in range(len(messages))]
    marked = [
        {**m, "content": mark} if m["content"].strip() else m
        for m, mark in zip(messages, marks, strict=True)
    ]
    taken, given = for_template(tokenizer, marked, tools)
    sent = [message.message for message in taken]
    fitted = fit_roles(tokenizer, sent, given)
    frame = render_chat(tokenizer, fitted, given)
    found = list(re.finditer("\ue000part:(\\d+)\ue001", frame))
    ends = [0, *(mark.end() for mark in found)]
    begins = [*(mark.start() for mark in found), len(frame)]
    between = [frame[low:high] for low, high in zip(ends, begins, strict=True)]
    names = [tool["function"]["name"] for tool in tools]
    with_tools = next((i for i, t in enumerate(between) if all(n in t for n in names)), 0)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    shown = [int(mark[1]) for mark in found]

    parts: list[tuple[str, int | None, int, int]] = []
    at = 0
    for place, piece in enumerate(between):
        if not text.startswith(piece, at):
            raise ValueError(f"{chat.name}: the template does not show its own text at {at}")
        role = "tools" if names and place == with_tools else _frame_role(messages, shown, place)
        parts.append((role, None, at, at + len(piece)))
        at += len(piece)
        if place == len(shown):
            break
        index = shown[place]
        stop = _end_of(text, at, messages[index]["content"], between[place + 1])
        shown_text = text[at:stop]
        low = at + len(shown_text) - len(shown_text.lstrip())
        high = max(low, at + len(shown_text.rstrip()))
        parts.append(("blank", index, at, low))
        parts += _message_parts(chat, messages[index], index, last_user, text, low, high)
        parts.append(("blank", index, high, stop))
        at = stop
    return parts


def _frame_role(messages: Sequence[dict[str, Any]], shown: Sequence[int], place: int) -> str:
    """What the template's text at a place has: the calls of the messages before it, or nothing."""
    low = shown[place - 1] if place else 0
    high = shown[place] if place < len(shown) else len(messages)
    return "calls" if any(m.get("tool_calls") for m in messages[low:high]) else "template"


def _end_of(text: str, at: int, content: str, after: str) -> int:
    for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(variant + after, at):
            return at + len(variant)
    end = text.find(after, at)  # the template has rewritten the message
    if end < 0:
        raise ValueError(f"the template does not show what follows a message at {at}")
    return end


def _message_parts(
    chat: Chat,
    message: dict[str, Any],
    index: int,
    last_user: int,
    text: str,
    start: int,
    stop: int,
) -> list[tuple[str, int | None, int, int]]:
    role = {"developer": "system", "tool": "result"}.get(message["role"], message["role"])
    content = text[start:stop]
    if role != "user":
        return [(role, index, start, stop)]
    is_last = index == last_user
    wanted = [content.find(request) for request in chat.requests] if is_last else []
    marked = [(m.start(), m.end(), "reminder") for m in _REMINDER.finditer(content)]
    marked += [
        (low, low + len(request), "request")
        for low, request in zip(wanted, chat.requests, strict=False)
        if low >= 0
    ]
    is_request = not chat.requests and len(_REMINDER.sub("", content)) <= LONGEST_REQUEST
    rest = ("request" if is_request else "long turn") if is_last else "old user"
    parts: list[tuple[str, int | None, int, int]] = []
    at = 0
    for low, high, kind in [*sorted(marked), (len(content), len(content), rest)]:
        if low > at:
            between = content[at:low]
            parts.append((rest if between.strip() else "blank", index, start + at, start + low))
        if high > low:
            name = kind if is_last else f"old {kind}"
            parts.append((name, index, start + low, start + high))
        at = max(at, high)
    return parts
