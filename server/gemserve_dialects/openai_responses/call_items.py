"""Calls as items of a response, in the form of the tool that they call."""

from __future__ import annotations

from collections.abc import Mapping

from gemserve.api.replies.answer_parts import Part
from gemserve.api.replies.call_arguments import parse_arguments, text_argument
from gemserve_dialects.openai_responses.called_tools import CalledTool
from gemserve_dialects.openai_responses.reply_types import (
    EchoedCustomTool,
    EchoedFunction,
    EchoedTool,
    OutputCall,
    OutputCustomCall,
    OutputSearch,
    Status,
)
from gemserve_dialects.openai_responses.tools import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    SearchTool,
    ServedTool,
)

_PREFIXES = {FunctionTool: "fc", CustomTool: "ctc", SearchTool: "tsc"}


class CallItems:
    """Writes calls. `tools` are those that can be called, by their names in the prompt."""

    def __init__(self, tools: Mapping[str, CalledTool]) -> None:
        self._tools = tools

    def kind(self, part: Part) -> type[FunctionTool] | type[CustomTool] | type[SearchTool]:
        return type(self._tools[part.name].spec)

    def id_prefix(self, part: Part) -> str:
        return _PREFIXES[self.kind(part)]

    def name(self, part: Part) -> str:
        """The tool's name without its namespace."""
        return self._tools[part.name].name

    def text_of(self, part: Part) -> str:
        """The input of a custom tool."""
        return text_argument(part.text, "input") if part.text else ""

    def item(
        self, part: Part, item_id: str, status: Status, *, is_open: bool
    ) -> OutputCall | OutputCustomCall | OutputSearch:
        """An open item is as it was when it was opened."""
        tool, kind = self._tools[part.name], self.kind(part)
        if kind is SearchTool:
            return {
                "type": "tool_search_call",
                "id": item_id,
                "call_id": part.call_id,
                "execution": "client",
                "arguments": {} if is_open else parse_arguments(part.text),
                "status": status,
            }
        item: OutputCall | OutputCustomCall
        if kind is CustomTool:
            item = {
                "type": "custom_tool_call",
                "id": item_id,
                "call_id": part.call_id,
                "name": tool.name,
                "input": "" if is_open else self.text_of(part),
                "status": status,
            }
        else:
            item = {
                "type": "function_call",
                "id": item_id,
                "call_id": part.call_id,
                "name": tool.name,
                "arguments": "" if is_open else part.text,
                "status": status,
            }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        return item


def echoed(tool: ServedTool) -> EchoedTool | None:
    """The tool as a response repeats it; None for one that cannot be called."""
    if isinstance(tool, (FunctionTool, CustomTool)):
        return _echoed_member(tool)
    if isinstance(tool, NamespaceTool):
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description,
            "tools": [_echoed_member(member) for member in tool.tools],
        }
    if isinstance(tool, SearchTool) and tool.execution == "client":
        return {
            "type": "tool_search",
            "execution": "client",
            "description": tool.description,
            "parameters": tool.parameters,
        }
    return None


def _echoed_member(tool: FunctionTool | CustomTool) -> EchoedFunction | EchoedCustomTool:
    if isinstance(tool, CustomTool):
        return {
            "type": "custom",
            "name": tool.name,
            "description": tool.description,
            "format": {"type": "text"} if tool.format is None else tool.format.model_dump(),
        }
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
