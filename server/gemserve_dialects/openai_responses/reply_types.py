"""The JSON of /v1/responses: the response, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gemserve.api.replies.citations import FileCitation
from gemserve.api.replies.reply_types import FilterObject, NonNegative, ProgressObject, ScoredToken

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[FileCitation], Field(description="With `filter.citations`.")]
    logprobs: list[ScoredToken]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """How the model came to its answer."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: Annotated[list[Any], Field(max_length=0)]
    content: Annotated[list[ReasoningText], Field(max_length=1)]


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: Annotated[list[OutputText], Field(max_length=1)]


class OutputCall(TypedDict):
    """`namespace` is that of the tool, if it has one."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str
    status: Status


class OutputCustomCall(TypedDict):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str
    status: Status


class OutputSearch(TypedDict):
    type: Literal["tool_search_call"]
    id: str
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any]
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputSearch


class InputTokensDetails(TypedDict):
    """As `PromptTokensDetails` of a chat."""

    cached_tokens: NonNegative
    kept_tokens: NonNegative
    protected_tokens: NonNegative


class ReasoningTokens(TypedDict):
    reasoning_tokens: NonNegative


class ResponseUsage(TypedDict):
    input_tokens: NonNegative
    input_tokens_details: InputTokensDetails
    output_tokens: NonNegative
    output_tokens_details: ReasoningTokens
    total_tokens: NonNegative


class Cut(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: Literal["server_error", "context_length_exceeded"]
    message: str


class TextConfig(TypedDict):
    format: Annotated[dict[str, Any], Field(description="As it was sent, or of type text.")]


class EchoedFunction(TypedDict):
    """A function as it was sent; null for what it does not say."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class EchoedCustomTool(TypedDict):
    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, str]


class EchoedNamespace(TypedDict):
    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[EchoedFunction | EchoedCustomTool]


class EchoedSearch(TypedDict):
    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None
    parameters: dict[str, Any] | None


EchoedTool = EchoedFunction | EchoedCustomTool | EchoedNamespace | EchoedSearch


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: NonNegative


class Response(TypedDict):
    """Fields that are always the same are there for clients that read them."""

    id: str
    object: Literal["response"]
    created_at: NonNegative
    model: str
    status: Status
    error: ResponseError | None
    incomplete_details: Cut | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: NonNegative | None
    max_tool_calls: NonNegative | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: None
    service_tier: None
    store: Literal[False]
    temperature: float
    text: TextConfig
    tool_choice: Annotated[str | dict[str, Any], Field(description="As it was sent, or auto.")]
    tools: Annotated[list[EchoedTool], Field(description="Those that can be called.")]
    top_logprobs: NonNegative
    top_p: float
    truncation: Literal["disabled", "auto"]
    user: str | None
    filter: NotRequired[FilterObject]


class Event(TypedDict):
    sequence_number: NonNegative


class ResponseEvent(Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response
    progress: NotRequired[Annotated[ProgressObject, Field(description="With include_progress.")]]


class ItemEvent(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: NonNegative
    item: OutputItem


class Place(TypedDict):
    item_id: str
    output_index: NonNegative
    content_index: Literal[0]


class PartEvent(Event, Place):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class DeltaEvent(Event, Place):
    type: Literal["response.output_text.delta"]
    delta: Annotated[str, Field(min_length=1)]
    logprobs: list[ScoredToken]


class TextEvent(Event, Place):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ScoredToken]


class ReasoningDeltaEvent(Event, Place):
    type: Literal["response.reasoning_text.delta"]
    delta: Annotated[str, Field(min_length=1)]


class ReasoningEvent(Event, Place):
    type: Literal["response.reasoning_text.done"]
    text: str


class AnnotationEvent(Event, Place):
    type: Literal["response.output_text.annotation.added"]
    annotation_index: NonNegative
    annotation: FileCitation


class CallPlace(TypedDict):
    item_id: str
    output_index: NonNegative


class ArgumentsDeltaEvent(Event, CallPlace):
    type: Literal["response.function_call_arguments.delta"]
    delta: Annotated[str, Field(min_length=1)]


class ArgumentsEvent(Event, CallPlace):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDeltaEvent(Event, CallPlace):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: Annotated[str, Field(min_length=1)]


class CustomInputEvent(Event, CallPlace):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


# The last one is response.completed, response.incomplete or response.failed.
AnyEvent = (
    ResponseEvent
    | ItemEvent
    | AnnotationEvent
    | PartEvent
    | DeltaEvent
    | TextEvent
    | ReasoningDeltaEvent
    | ReasoningEvent
    | ArgumentsDeltaEvent
    | ArgumentsEvent
    | CustomInputDeltaEvent
    | CustomInputEvent
)
