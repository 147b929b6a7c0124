"""Tools and calls as a chat template takes them: its own way, or in words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
Message = dict[str, Any]  # its `tool_calls` have arguments that are parsed, if they are JSON
_INTRODUCTION = """You can call these functions:
{functions}
To call one, answer with nothing but JSON of this form: {{"name": "...", "arguments": {{...}}}}"""
_SYSTEM = ("system", "developer")


def for_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[Sequence[Message], Sequence[Tool]]:
    """What the model's chat template can take of them.

    If that is messages alone, tools are told in the system message, and calls become content.
    """
    if _takes_tools(tokenizer):
        return messages, tools
    return _in_words(messages, tools), ()


def _in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    spoken = [_spoken(message) for message in messages]
    if not tools:
        return spoken
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = _INTRODUCTION.format(functions=functions)
    if spoken and spoken[0]["role"] in _SYSTEM:
        first = spoken[0]
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *spoken[1:]]
    return [{"role": "system", "content": told}, *spoken]


def _spoken(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return {
        "role": message["role"],
        "content": "\n".join(filter(None, [message["content"], *calls])),
    }


def _takes_tools(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    return any(re.search(r"\btools\b", text) for text in texts)
