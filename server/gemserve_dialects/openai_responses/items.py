"""The items of `input` of /v1/responses: messages, and earlier calls with their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field
from pydantic.config import JsonDict

from gemserve.api.requests.base_bodies import TextOr
from gemserve.api.requests.chat_body import CalledFunction, Message, ToolCall
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.omitted_parts import (
    OMITTED,
    OmittedPart,
    but_not,
    first_of_last_turn,
    or_omitted,
)
from gemserve.api.requests.paired_calls import paired
from gemserve.api.requests.served_types import (
    TEXT_ONLY,
    HistoryItem,
    of_type,
    refuse_others,
    type_of,
)
from gemserve.errors import RequestError
from gemserve_dialects.openai_responses.called_tools import flat_name, flattened
from gemserve_dialects.openai_responses.tools import SEARCH_NAME, ServedTool, Tools

Status = Literal["in_progress", "completed", "incomplete"]
_REASONS = {"item_reference": "is not served: nothing is stored, so send the item itself"}
_OTHER_ITEMS = "is not served: this server runs no tools, it only asks for calls of functions"
# the items of hosted tools, and of those that OpenAI's models know without a description
_HOSTED_ITEM = (
    r"[a-z0-9_]+_(call|call_output|list_tools|approval_request|approval_response)|compaction"
)


class InputText(HistoryItem):
    """A chat's `text` is taken, too. What follows it is of earlier answers, and is not read."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


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


_SENT_FILE = ("file_data", "file_url")
_TEXTS = get_args(InputText.model_fields["type"].annotation)


def _sent_as(name: str) -> JsonDict:
    """The schema of a file whose content, or address, is in the field `name`."""
    fields: JsonDict = {"type": {"const": "input_file"}, name: {"type": "string"}}
    return {"properties": fields, "required": [name]}


class OmittedInput(OmittedPart):
    """A part of another type, or a file that is not stored here."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                but_not(*_TEXTS, "refusal", "input_file"),
                *map(_sent_as, _SENT_FILE),
            ]
        }
    )


def _tag_of(part: object) -> str:
    """The tag of a part. A file that is not stored here is not read."""
    kind = type_of(part)
    if kind in _TEXTS or not isinstance(kind, str):
        kind = "input_text"
    elif kind == "input_file":
        given = part if isinstance(part, dict) else {}
        is_sent = any(isinstance(given.get(name), str) for name in _SENT_FILE)
        kind = OMITTED if is_sent else kind
    elif kind != "refusal":
        kind = OMITTED
    return of_type(kind).tag


AnyPart = InputText | InputRefusal | InputFile | OmittedInput
MessagePart = Annotated[
    Annotated[InputText, of_type("input_text")]
    | Annotated[InputRefusal, of_type("refusal")]
    | Annotated[InputFile, of_type("input_file")]
    | Annotated[OmittedInput, of_type(OMITTED)],
    Discriminator(_tag_of),
]


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
    arguments: TextOr[dict[str, Any]]
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
    output: TextOr[Annotated[list[MessagePart], Field(fail_fast=True)]]
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


_ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "tool_search_call", "tool_search_output", "additional_tools"),
    "reasoning",
)


class HostedItem(OmittedPart):
    """A call of a tool that another server has run, or what it gave."""

    model_config = ConfigDict(json_schema_extra=but_not(*_ITEMS))
    type: Annotated[str, Field(pattern=f"^({_HOSTED_ITEM})$")]


Item = Annotated[
    Annotated[InputMessage, of_type("message")]
    | Annotated[FunctionCall, of_type("function_call")]
    | Annotated[CustomToolCall, of_type("custom_tool_call")]
    | Annotated[CallOutput, of_type("function_call_output")]
    | Annotated[CallOutput, of_type("custom_tool_call_output")]
    | Annotated[ToolSearchCall, of_type("tool_search_call")]
    | Annotated[ToolSearchOutput, of_type("tool_search_output")]
    | Annotated[AdditionalTools, of_type("additional_tools")]
    | Annotated[Reasoning, of_type("reasoning")]
    | Annotated[HostedItem, of_type(OMITTED)],
    or_omitted(_ITEMS),
    refuse_others(_ITEMS, _REASONS, default="message", otherwise=_OTHER_ITEMS, also=_HOSTED_ITEM),
]


def chat_messages(items: Sequence[Item]) -> list[Message]:
    """The items as messages of a chat.

    A call belongs to the assistant's message before it, and so does the text behind a call: the
    call's result must follow it.
    """
    _check_last_turn(items)
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            _add_text(messages, item.role, _text_of(item.content))
        elif isinstance(item, (FunctionCall, CustomToolCall, ToolSearchCall)):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message.model_construct(role="assistant", content=""))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), chat_call(item)]
        elif isinstance(item, HostedItem):
            _add_text(messages, "assistant", item.text)
        elif isinstance(item, CallOutput):
            messages.append(_result(item.call_id, _text_of(item.output)))
        elif isinstance(item, ToolSearchOutput):
            names = [tool.flat_name for tool in flattened(item.tools, "")]
            text = f"You can call {', '.join(names)}." if names else "No tool was found."
            messages.append(_result(item.call_id, text))
    return paired(messages)


def _add_text(messages: list[Message], role: str, text: str) -> None:
    """Add a message, or its text to the last one if that has called tools."""
    if role == "assistant" and messages and messages[-1].tool_calls:
        messages[-1].content = "\n\n".join(filter(None, (messages[-1].text, text)))
    else:
        messages.append(Message.model_construct(role=role, content=text))


def _check_last_turn(items: Sequence[Item]) -> None:
    """Raise `RequestError` for a part that the user has sent last, and that is not read."""
    roles = [item.role if isinstance(item, InputMessage) else "tool" for item in items]
    first = first_of_last_turn(roles)
    for index, item in enumerate(items[first:], first):
        if not isinstance(item, InputMessage) or item.role != "user":
            continue
        parts = () if isinstance(item.content, str) else item.content
        for place, part in enumerate(parts):
            if isinstance(part, OmittedPart):
                raise _not_read(part.type, f"input.{index}.content.{place}")


def _not_read(kind: str, field: str) -> RequestError:
    """The error for a part of this type at `field`."""
    if kind == "input_file":
        field = f"{field}.file_id"
        return RequestError(
            f"{field}: required: store the file with POST /v1/documents and name its id",
            param=field,
        )
    return RequestError(f"{field}: {kind} {TEXT_ONLY}", param=field)


def further_tools(items: Sequence[Item]) -> Iterator[tuple[str, Sequence[ServedTool]]]:
    """The tools that items bring, each list with its path in the request."""
    for place, item in enumerate(items):
        if isinstance(item, (ToolSearchOutput, AdditionalTools)):
            yield f"input.{place}.tools", item.tools


def chat_call(call: FunctionCall | CustomToolCall | ToolSearchCall) -> ToolCall:
    """The call as a chat has it, with the name and the arguments that the prompt knows."""
    arguments: str | dict[str, Any]
    if isinstance(call, ToolSearchCall):
        name, arguments = SEARCH_NAME, json.dumps(call.arguments, ensure_ascii=False)
    else:
        name = flat_name(call.name, call.namespace)
        arguments = call.arguments if isinstance(call, FunctionCall) else {"input": call.input}
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call.call_id, type="function", function=function)


def _result(call_id: str | None, text: str) -> Message:
    return Message.model_construct(role="tool", content=text, tool_call_id=call_id)


def _text_of(content: str | Sequence[AnyPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if not _is_thought(part))


def _is_thought(part: AnyPart) -> bool:
    return isinstance(part, OmittedPart) and part.is_thought
