"""Tools and tool calls as a chat template takes them: as data, or written into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
# its `tool_calls` have arguments that are parsed, if they are JSON; where these are written into
# the content, `called` has the names of the calls by their ids
Message = dict[str, Any]
_INTRODUCTION = """You can call these functions:
{functions}
To call one, answer with nothing but JSON of this form: {{"name": "...", "arguments": {{...}}}}"""
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content.

    `index`: the number of the client's message that it is of. `is_written`: the server has written
    it, to describe tools or a call.
    """

    text: str
    index: int
    role: str
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A message as a chat template takes it. Its content has the `parts` in their order.

    `called`: its calls, which the template may get as text.
    """

    message: Message
    parts: tuple[ContentPart, ...]
    called: tuple[Message, ...] = ()

    def written(self, text: str, separator: str) -> TemplateMessage:
        """The message with a text of the server's at its end."""
        content = separator.join(filter(None, [self.message["content"], text]))
        part = ContentPart(text, self.parts[-1].index, self.message["role"], is_written=True)
        return replace(
            self, message={**self.message, "content": content}, parts=(*self.parts, part)
        )


def for_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[TemplateMessage], Sequence[Tool]]:
    """Messages and tools as the model's chat template takes them.

    If it takes messages alone, the system message describes the tools, and calls become content.
    """
    taken = [
        TemplateMessage(
            message,
            (ContentPart(message["content"], index, message["role"]),),
            tuple(message.get("tool_calls") or ()),
        )
        for index, message in enumerate(messages)
    ]
    if _takes_tools(tokenizer):
        return list(_with_names(taken)), tools
    return _described(tools, [_with_calls(message) for message in taken]), ()


def _with_names(messages: Sequence[TemplateMessage]) -> Iterator[TemplateMessage]:
    """The messages, in which results of tools have the `name` that some templates show."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.called}
        fields = message.message
        name = names.get(fields.get("tool_call_id", "")) if fields["role"] == "tool" else None
        if name is not None and fields.get("name") is None:
            message = replace(message, message={**fields, "name": name})
        yield message


def _described(tools: Sequence[Tool], messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """The messages, of which the first one describes the tools."""
    if not tools:
        return messages
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(functions=functions)
    if messages and messages[0].message["role"] in _SYSTEM:
        return [messages[0].written(introduction, "\n\n"), *messages[1:]]
    system = {"role": "system", "content": introduction}
    return [
        TemplateMessage(system, (ContentPart(introduction, 0, "system", is_written=True),)),
        *messages,
    ]


def _with_calls(message: TemplateMessage) -> TemplateMessage:
    """The message with its calls as content."""
    fields = message.message
    if "tool_calls" not in fields:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in fields["tool_calls"]]
    plain = {
        "role": fields["role"],
        "content": fields["content"],
        "called": {call["id"]: call["function"]["name"] for call in fields["tool_calls"]},
    }
    return replace(message, message=plain).written("\n".join(calls), "\n")


def _takes_tools(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any(re.search(r"\btools\b", text) for text in texts)
