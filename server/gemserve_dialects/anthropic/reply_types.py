"""The JSON of /v1/messages in Anthropic's form: the message, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gemserve.api.replies.citations import Citation
from gemserve.api.replies.reply_types import FilterObject, NonNegative, ProgressObject
from gemserve_dialects.anthropic.errors import AnthropicError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Text(TypedDict):
    """`citations`: if they were asked for. In a stream they follow the text."""

    type: Literal["text"]
    text: str
    citations: NotRequired[list[Citation]]


class Thinking(TypedDict):
    """How the model came to its answer. Nothing is signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUse(TypedDict):
    type: Literal["tool_use"]
    id: Annotated[str, Field(pattern="^toolu_")]
    name: str
    input: dict[str, Any]


ContentBlock = Text | Thinking | ToolUse


class MessageUsage(TypedDict):
    """`input_tokens` counts what was sent without `cache_read_input_tokens`, as Anthropic does."""

    input_tokens: NonNegative
    output_tokens: NonNegative
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: NonNegative


class AppliedEdits(TypedDict):
    """With `context_management`. Nothing is removed from a conversation."""

    applied_edits: Annotated[list[Any], Field(max_length=0)]


class Message(TypedDict):
    """`max_tokens` is the limit of this answer: what was sent, or what the context leaves."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    max_tokens: Annotated[int, Field(ge=1)]
    context_management: NotRequired[AppliedEdits]
    filter: NotRequired[FilterObject]


class TokenCount(TypedDict):
    input_tokens: NonNegative


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: Message


class Ping(TypedDict):
    """It keeps the connection open. With `include_progress` it has what chat chunks have."""

    type: Literal["ping"]
    progress: NotRequired[ProgressObject]


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: NonNegative
    content_block: ContentBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: Annotated[str, Field(min_length=1)]


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: Annotated[str, Field(min_length=1)]


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: Annotated[str, Field(min_length=1)]


class CitationsDelta(TypedDict):
    type: Literal["citations_delta"]
    citation: Citation


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: NonNegative
    delta: TextDelta | ThinkingDelta | InputDelta | CitationsDelta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: NonNegative


class Stop(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage
    context_management: NotRequired[AppliedEdits]


class MessageStop(TypedDict):
    type: Literal["message_stop"]


# The last one is message_stop or error.
AnyEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
