"""`tools` and `tool_choice`: what they mean for the prompt, the grammar and the reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gemserve.api.requests.answer_format import answer_format
from gemserve.api.requests.chat_body import AllowedTools, ChatBody, NamedTool, Tool
from gemserve.errors import RequestError, shown

ToolChoice = Literal["none", "auto", "required"] | NamedTool | None
_PARAMETERS = "tools.{}.function.parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRules:
    """Which calls an answer may have.

    `is_forced`: the answer must be a call. `is_named`: `tool_choice` names its function. `is_held`:
    a grammar makes the answer a call or what the format demands. `parameters_field`: the path of a
    function's parameters, with {} for the function's index. `parameters`: their schemas, by the
    names of the functions.
    """

    names: frozenset[str]
    is_forced: bool
    is_named: bool
    is_parallel: bool
    is_held: bool = False
    parameters_field: str = _PARAMETERS
    parameters: Mapping[str, Mapping[str, Any]] | None = None

    def field(self, index: int) -> str:
        return self.parameters_field.format(index)


def chat_call_rules(body: ChatBody) -> ToolCallRules | None:
    """Which calls the answer to a chat may have: see `call_rules`."""
    assert not isinstance(body.tool_choice, AllowedTools), "the body has only the allowed tools"
    return call_rules(
        body.tools or [],
        body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        has_format=answer_format(body) is not None,
    )


def call_rules(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    is_parallel: bool,
    has_format: bool,
    parameters_field: str = _PARAMETERS,
) -> ToolCallRules | None:
    """Which calls the answer may have; None if it can only be text. Raises `RequestError`.

    `has_format`: an answer that is no call must fit a schema.
    """
    names = [tool.function.name for tool in tools]
    for name, count in Counter(names).items():
        if count > 1:
            raise RequestError(f"tools: {count} functions have the name {name}", param="tools")
    for index, tool in enumerate(tools):
        if (tool.function.parameters or {}).get("type", "object") != "object":
            field = parameters_field.format(index)
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
    is_named = isinstance(choice, NamedTool)
    is_forced = is_named or choice == "required"
    return ToolCallRules(
        names=frozenset([choice.function.name] if isinstance(choice, NamedTool) else names),
        is_forced=is_forced,
        is_named=is_named,
        is_parallel=is_parallel,
        is_held=has_format and not is_forced,
        parameters_field=parameters_field,
        parameters={tool.function.name: tool.function.parameters or {} for tool in tools},
    )


def prompt_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools in the form of chat templates; none if `tool_choice` is "none"."""
    return [] if body.tool_choice == "none" else [tool.plain for tool in body.tools or ()]


def check_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools that nothing will call, in the form of chat templates. Raises `RequestError`."""
    call_rules(tools or (), None, is_parallel=True, has_format=False)
    return [tool.plain for tool in tools or ()]
