"""The items of `input` of /v1/responses: messages, and earlier calls with their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gemserve.api.openai_responses.called_tools import flat_name, flattened
from gemserve.api.openai_responses.tools import SEARCH_NAME, ServedTool, Tools
from gemserve.api.requests.base_bodies import TextOr
from gemserve.api.requests.chat_body import CalledFunction, Message, ToolCall
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.served_types import TEXT_ONLY, HistoryItem, by_type, refuse_others

Status = Literal["in_progress", "completed", "incomplete"]
_MEDIA = dict.fromkeys(("input_image", "input_file", "input_audio"), TEXT_ONLY)
_REASONS = {"item_reference": "is not served: nothing is stored, so send the item itself"}
_OTHER_ITEMS = "is not served: this server runs no tools, it only asks for calls of functions"


class InputText(HistoryItem):
    """`annotations` and `logprobs` of earlier answers are not read."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputRefusal(HistoryItem):
    """A refusal is read as a text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputFile(HistoryItem):
    """A stored document in place of its text. `filename` has no effect."""

    type: Literal["input_file"]
    file_id: DocumentReference
    filename: str | None = None

    @property
    def text(self) -> str:
        return self.file_id.text


TextPart = Annotated[InputText, refuse_others(("input_text", "output_text"), _MEDIA)]
MessagePart = Annotated[
    InputText | InputRefusal | InputFile,
    Field(discriminator="type"),
    refuse_others(("input_text", "output_text", "refusal", "input_file"), _MEDIA),
]
Parts = Sequence[InputText] | Sequence[InputText | InputRefusal | InputFile]


class InputMessage(HistoryItem):
    """A message of the conversation; an earlier answer as the server gave it."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[Annotated[list[MessagePart], Field(fail_fast=True)]]
    id: str | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    status: Status | None = None


class CallItem(HistoryItem):
    """`caller` has no effect."""

    id: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None


class FunctionCall(CallItem):
    """A call that an earlier answer asked for."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    parsed_arguments: Any = None  # OpenAI's SDK adds them to a reply, and LangChain sends them back


class CustomToolCall(CallItem):
    """A call of a custom tool that an earlier answer asked for."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutput(CallItem):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOr[Annotated[list[TextPart], Field(fail_fast=True)]]
    name: str | None = None
    namespace: str | None = None


class ToolSearchCall(CallItem):
    """A search for tools that an earlier answer asked for."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    arguments: Any


class ToolSearchOutput(CallItem):
    """The tools that a search found. From then on they can be called."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    tools: Tools


class AdditionalTools(HistoryItem):
    """Further tools, as if they were in `tools`."""

    type: Literal["additional_tools"]
    tools: Tools
    id: str | None = None
    role: str | None = None


class Reasoning(HistoryItem):
    """How another model came to an earlier answer. It is left out of the prompt."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[ToolSearchCall, Tag("tool_search_call")]
    | Annotated[ToolSearchOutput, Tag("tool_search_output")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[Reasoning, Tag("reasoning")],
    by_type("message"),
    refuse_others(
        (
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "tool_search_call",
            "tool_search_output",
            "additional_tools",
            "reasoning",
        ),
        _REASONS,
        default="message",
        otherwise=_OTHER_ITEMS,
    ),
]


def chat_messages(items: Sequence[Item]) -> list[Message]:
    """The items as messages of a chat. A call belongs to the assistant's message before it."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            content = _text_of(item.content)
            messages.append(Message.model_construct(role=item.role, content=content))
        elif isinstance(item, (FunctionCall, CustomToolCall, ToolSearchCall)):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message.model_construct(role="assistant", content=""))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), chat_call(item)]
        elif isinstance(item, CallOutput):
            messages.append(_result(item.call_id, _text_of(item.output)))
        elif isinstance(item, ToolSearchOutput):
            names = [tool.flat_name for tool in flattened(item.tools, "")]
            text = f"You can call {', '.join(names)}." if names else "No tool was found."
            messages.append(_result(item.call_id or "", text))
    return messages


def further_tools(items: Sequence[Item]) -> Iterator[tuple[str, Sequence[ServedTool]]]:
    """The tools that items bring, each list with its path in the request."""
    for place, item in enumerate(items):
        if isinstance(item, (ToolSearchOutput, AdditionalTools)):
            yield f"input.{place}.tools", item.tools


def chat_call(call: FunctionCall | CustomToolCall | ToolSearchCall) -> ToolCall:
    """The call as a chat has it, with the name and the arguments that the prompt knows."""
    if isinstance(call, ToolSearchCall):
        name, arguments = SEARCH_NAME, json.dumps(call.arguments, ensure_ascii=False)
    else:
        name = flat_name(call.name, call.namespace)
        arguments = (
            call.arguments
            if isinstance(call, FunctionCall)
            else json.dumps({"input": call.input}, ensure_ascii=False)
        )
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call.call_id or "", type="function", function=function)


def _result(call_id: str, text: str) -> Message:
    return Message.model_construct(role="tool", content=text, tool_call_id=call_id)


def _text_of(content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
