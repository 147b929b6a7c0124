"""Tools and tool calls as a chat template takes them: as data, or written into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
# its `tool_calls` have arguments that are parsed, if they are JSON; where these are written into
# the content, `called` has the names of the calls by their ids
Message = dict[str, Any]
_INTRODUCTION = """You can call these functions:
{functions}
To call one, answer with nothing but JSON of this form: {{"name": "...", "arguments": {{...}}}}"""
_SYSTEM = ("system", "developer")


def for_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[Sequence[Message], Sequence[Tool]]:
    """Messages and tools as the model's chat template takes them.

    If it takes messages alone, the system message describes the tools, and calls become content.
    """
    if _takes_tools(tokenizer):
        return messages, tools
    return _as_messages(messages, tools), ()


def _as_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(functions=functions)
    if plain and plain[0]["role"] in _SYSTEM:
        first = plain[0]
        return [{**first, "content": f"{first['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _plain_message(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return {
        "role": message["role"],
        "content": "\n".join(filter(None, [message["content"], *calls])),
        "called": {call["id"]: call["function"]["name"] for call in message["tool_calls"]},
    }


def _takes_tools(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any(re.search(r"\btools\b", text) for text in texts)
