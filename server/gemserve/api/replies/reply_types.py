"""Replies as the OpenAPI document describes them. Nothing is built or checked with these types
while serving: tests/contract holds real replies to them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.requests.base_bodies import ToolCall
from gemserve.types import FilterReport

Whole = Annotated[int, Field(ge=0)]
Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(TypedDict):
    message: str
    type: Literal["invalid_request_error", "requests", "overloaded_error", "server_error"]
    param: Annotated[str | None, Field(description="The field at fault, with its path.")]
    code: str | None


class Error(TypedDict):
    error: ErrorDetail


class Usage(TypedDict):
    """`prompt_tokens` counts what was sent, not what the filter kept."""

    prompt_tokens: Whole
    completion_tokens: Whole
    total_tokens: Whole


class Answer(TypedDict):
    id: str
    created: Whole
    model: str


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Whole]


class CompletionText(TypedDict):
    index: Whole
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(CompletionText):
    finish_reason: Finish


class CompletionPart(CompletionText):
    finish_reason: Finish | None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage
    filter: FilterReport | list[FilterReport]  # a list where several prompts were asked


class Chunk(Answer):
    """A choice's first chunk has its `filter`. Usage comes last, and only if it was asked for."""

    usage: NotRequired[Usage | None]
    filter: NotRequired[FilterReport]


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionPart], Field(max_length=1)]


class Token(TypedDict):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ScoredToken(Token):
    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    content: list[ScoredToken]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(min_length=1)]]


class ChatChoice(TypedDict):
    index: Whole
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class Chat(Answer):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    filter: FilterReport


class FunctionPart(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallPart(TypedDict):
    """A call's first part has its id, type and name."""

    index: Whole
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPart


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[CallPart], Field(min_length=1)]]


class ChatPart(TypedDict):
    index: Whole
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatPart], Field(max_length=1)]


class Selection(TypedDict):
    filter: FilterReport
    text: str
    usage: Usage


class Tokens(TypedDict):
    count: Whole
    max_model_len: Whole
    tokens: list[Whole]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """As in the model's `tokenizer_config.json`."""

    tokenizer_class: str
    vocab_size: Whole
    model_max_length: Whole
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    added_tokens_decoder: dict[str, str]
    chat_template: str | dict[str, Any] | None


class Model(TypedDict):
    """`parent`: of one with an adapter, the one without."""

    id: str
    object: Literal["model"]
    created: Whole
    owned_by: Literal["gemserve"]
    max_model_len: Whole
    parent: str | None


class Models(TypedDict):
    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Adapter(TypedDict):
    """`positions`: of the context, those it takes. One that is not `loaded` is when it is used."""

    id: str
    object: Literal["adapter"]
    name: str
    path: str
    type: Annotated[str, Field(description="ntk, prefix, activation or lora")]
    version: str
    bytes: Whole
    positions: Whole
    loaded: bool
    parent: str


class Adapters(TypedDict):
    object: Literal["list"]
    data: list[Adapter]


class AdapterDeleted(TypedDict):
    id: str
    object: Literal["adapter"]
    deleted: Literal[True]


class Alive(TypedDict):
    status: Literal["ok"]


class NotAlive(TypedDict):
    """`cause`: of the engine's death."""

    status: Literal["dead", "shutting down"]
    cause: NotRequired[str]


class Version(TypedDict):
    """`attention_backend`: what evaluates attention; `kernels`: what runs the other operations."""

    version: str
    attention_backend: str
    kernels: Annotated[str, Field(description="triton or torch")]
