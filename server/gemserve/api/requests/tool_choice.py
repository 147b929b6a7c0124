"""`tools` and `tool_choice`: what they mean for the prompt, the grammar and the reply."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.api.requests.chat_body import ChatBody, NamedTool, Tool
from gemserve.errors import RequestError, shown
from gemserve.types import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRules:
    """Which calls an answer may have.

    `is_forced`: the answer must be a call. `is_named`: `tool_choice` names its function.
    """

    names: frozenset[str]
    is_forced: bool
    is_named: bool
    is_parallel: bool


def call_rules(body: ChatBody) -> ToolCallRules | None:
    """Which calls the answer may have; None if it can only be text. Raises `RequestError`."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    for name, count in Counter(names).items():
        if count > 1:
            raise RequestError(f"tools: {count} functions have the name {name}", param="tools")
    for index, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            field = f"tools.{index}.function.parameters"
            raise RequestError(f"{field}: must describe an object", param=field)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: needs tools", param="tool_choice")
        return None
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            f"tool_choice.function.name={shown(choice.function.name)}: not one of the tools",
            param="tool_choice.function.name",
        )
    if choice == "none":
        return None
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            "response_format: not together with tools that may be called", param="response_format"
        )
    is_named = isinstance(choice, NamedTool)
    return ToolCallRules(
        names=frozenset([choice.function.name] if isinstance(choice, NamedTool) else names),
        is_forced=is_named or choice == "required",
        is_named=is_named,
        is_parallel=body.parallel_tool_calls is not False,
    )


def prompt_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools in the form of chat templates; none if `tool_choice` is "none"."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def call_grammar(tools: Sequence[Tool], rules: ToolCallRules) -> tuple[Grammar, str]:
    """The grammar of one call of a function that the rules name, and the field it comes from."""
    named = [(i, tool) for i, tool in enumerate(tools) if tool.function.name in rules.names]
    grammar = Grammar(json.dumps({"anyOf": [_call_schema(i, tool) for i, tool in named]}))
    return grammar, f"tools.{named[0][0]}.function.parameters" if len(named) == 1 else "tools"


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    # with its own id, references such as #/$defs/x stay within this function's schema
    arguments = {"$id": f"urn:gemserve:tool:{index}", "type": "object", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
