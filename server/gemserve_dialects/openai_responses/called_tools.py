"""The tools that an answer may call: those of namespaces have the namespace in their name.

The prompt and the grammar know functions only. A function of a namespace is called
`namespace__name` there, and a custom tool is a function with one text. Replies and histories have
OpenAI's forms again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gemserve.api.requests.chat_body import MAX_TOOLS, NamedFunction, NamedTool, Tool
from gemserve.api.requests.tool_choice import ToolChoice as ChatToolChoice
from gemserve.errors import RequestError, shown
from gemserve_dialects.openai_responses.tools import (
    DEFAULT_NAMESPACE,
    SEARCH_NAME,
    AllowedTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    SearchTool,
    ServedTool,
    ToolChoice,
)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """`field`: the path of the tool in the request. `about`: what its namespace says of itself."""

    spec: FunctionTool | CustomTool | SearchTool
    field: str
    namespace: str | None = None
    about: str | None = None

    @property
    def name(self) -> str:
        return SEARCH_NAME if isinstance(self.spec, SearchTool) else self.spec.name

    @property
    def flat_name(self) -> str:
        return flat_name(self.name, self.namespace)

    @property
    def parameters_field(self) -> str:
        return f"{self.field}.{'format' if isinstance(self.spec, CustomTool) else 'parameters'}"

    @property
    def chat(self) -> Tool:
        """The tool as a chat has it."""
        function = self.spec.function(self.flat_name)
        if self.about:
            note = f"All functions {flat_name('…', self.namespace)}: {self.about}"
            function.description = "\n\n".join(filter(None, [function.description, note]))
        return Tool.model_construct(type="function", function=function)


def flat_name(name: str, namespace: str | None) -> str:
    if namespace is None or namespace == DEFAULT_NAMESPACE:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def called_tools(
    sent: Sequence[ServedTool], found: Iterable[tuple[str, Sequence[ServedTool]]]
) -> list[CalledTool]:
    """The tools that can be called. Hosted ones are left out. Raises `RequestError`.

    `found`: further tools that the history brings, each list with its path. Of these the first one
    of a name counts: a client may have found the same tool twice.
    """
    tools = list(flattened(sent, "tools"))
    names = {tool.flat_name for tool in tools}
    for field, listed in found:
        for tool in flattened(listed, field):
            if tool.flat_name not in names:
                names.add(tool.flat_name)
                tools.append(tool)
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools: {len(tools)} tools with those of namespaces and of the input, the limit is "
            f"{MAX_TOOLS}",
            param="tools",
        )
    for name, count in Counter(tool.flat_name for tool in tools).items():
        if count > 1:
            raise RequestError(f"tools: {count} tools have the name {name}", param="tools")
    return tools


def flattened(tools: Sequence[ServedTool], field: str) -> Iterator[CalledTool]:
    """Those of `tools` that can be called. `field`: the path of the list in the request."""
    for place, tool in enumerate(tools):
        path = f"{field}.{place}"
        if isinstance(tool, NamespaceTool):
            is_default = tool.name == DEFAULT_NAMESPACE
            for inner, member in enumerate(tool.tools):
                about = tool.description if inner == 0 and not is_default else None
                namespace = None if is_default else tool.name
                yield CalledTool(member, f"{path}.tools.{inner}", namespace, about)
        elif isinstance(tool, SearchTool):
            if tool.execution == "client":  # else OpenAI's servers would search
                yield CalledTool(tool, path)
        elif isinstance(tool, (FunctionTool, CustomTool)):
            yield CalledTool(tool, path)


def chosen_tools(
    choice: ToolChoice | None, tools: list[CalledTool], *, has_hosted: bool
) -> tuple[list[CalledTool], ChatToolChoice]:
    """The tools of the prompt, and the choice as a chat has it. Raises `RequestError`."""
    wanted: ChatToolChoice = None
    if isinstance(choice, AllowedTools):
        tools, wanted = _allowed(choice, tools), choice.mode
        has_hosted = True  # an empty list of tools is not the client's mistake
    elif isinstance(choice, ChosenTool):
        function = NamedFunction.model_construct(name=_find(choice, tools, "tool_choice").flat_name)
        wanted = NamedTool.model_construct(type="function", function=function)
        _check_held(tool for tool in tools if tool.flat_name == function.name)
    elif choice is not None:
        wanted = choice
    if wanted == "required" and not tools and has_hosted:
        raise RequestError(
            "tool_choice: none of the tools can be called: this server runs no hosted tools",
            param="tool_choice",
        )
    if wanted == "required":
        _check_held(tools)
    return tools, wanted


def _check_held(tools: Iterable[CalledTool]) -> None:
    """Raise `RequestError` for a grammar that a forced call cannot be held to."""
    for tool in tools:
        if isinstance(tool.spec, CustomTool) and tool.spec.has_unheld_grammar:
            field = f"{tool.field}.format.syntax"
            raise RequestError(
                f"{field}=lark: a call that tool_choice forces cannot be held to it; use auto, or "
                "syntax regex",
                param=field,
            )


def _allowed(choice: AllowedTools, tools: Sequence[CalledTool]) -> list[CalledTool]:
    names = {
        _find(allowed, tools, f"tool_choice.tools.{index}").flat_name
        for index, allowed in enumerate(choice.tools)
        if isinstance(allowed, ChosenTool)
    }
    return [tool for tool in tools if tool.flat_name in names]


def _find(chosen: ChosenTool, tools: Sequence[CalledTool], field: str) -> CalledTool:
    """The tool of that name, with its namespace or without. Raises `RequestError`."""
    kind = CustomTool if chosen.type == "custom" else FunctionTool
    found = [
        tool
        for tool in tools
        if isinstance(tool.spec, kind) and chosen.name in (tool.flat_name, tool.name)
    ]
    exact = [tool for tool in found if tool.flat_name == chosen.name]
    if len(exact or found) != 1:
        problem = f"one of {len(found)} namespaces" if found else "not one of the tools"
        raise RequestError(f"{field}.name={shown(chosen.name)}: {problem}", param=f"{field}.name")
    return (exact or found)[0]
