"""The items of `input` of /v1/responses: messages, and earlier calls with their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

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


class FunctionCall(HistoryItem):
    """A call that an earlier answer asked for."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None  # OpenAI's SDK adds them to a reply, and LangChain sends them back


class FunctionCallOutput(HistoryItem):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOr[Annotated[list[TextPart], Field(fail_fast=True)]]
    id: str | None = None
    name: str | None = None
    status: Status | None = None


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
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    by_type("message"),
    refuse_others(
        ("message", "function_call", "function_call_output", "reasoning"),
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
        elif isinstance(item, FunctionCall):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message.model_construct(role="assistant", content=""))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), chat_call(item)]
        elif isinstance(item, FunctionCallOutput):
            output = _text_of(item.output)
            messages.append(
                Message.model_construct(role="tool", content=output, tool_call_id=item.call_id)
            )
    return messages


def chat_call(call: FunctionCall) -> ToolCall:
    function = CalledFunction.model_construct(name=call.name, arguments=call.arguments)
    return ToolCall.model_construct(id=call.call_id, type="function", function=function)


def _text_of(content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
