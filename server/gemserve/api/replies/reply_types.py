"""The JSON of every reply but those of /v1/responses. The OpenAPI document is written from it too.

Nothing is checked with these types while serving: mypy checks the code that builds replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, GetPydanticSchema
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.requests.base_bodies import ServedMethod
from gemserve.contract import reports
from gemserve.contract.scores import AnswerAttention

NonNegative = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport(reports.FilterReport):
    """What the filter did; the `filter` object of every response.

    `kept_tokens`: those of the prompt that the answer is generated from; `added_tokens` stand
    between their passages. `protected_tokens`: of the prompt, how many are always read, outside of
    the budget. `messages`: what was kept of each message; None if the prompt is no chat.
    `coverage`: see `filtering.selector.Choice`; below `coverage_bound` a choice is not trusted.
    Both are None if the method does not measure it. `window`: the most tokens of a window.
    `windows`: how many the documents were cut into, of which the document cache had
    `cached_windows`. All three are None if the prompt was read as one sequence, or whole.
    `reader`: which model looked, where the server has two; None: nobody did, or there is one.
    """

    method: ServedMethod


# a `FilterReport` as a dictionary
FilterObject = Annotated[
    dict[str, Any], GetPydanticSchema(lambda _, handler: handler(FilterReport))
]


# an `AnswerAttention` as a dictionary
AttentionObject = Annotated[
    dict[str, Any], GetPydanticSchema(lambda _, handler: handler(AnswerAttention))
]


class AttentionExtras(TypedDict):
    """`attention`: if it is requested; in a stream, of a choice's last chunk."""

    attention: NotRequired[AttentionObject]


class TokenIds(TypedDict):
    """With `return_token_ids`: those that were drawn, also the one that ended the answer."""

    token_ids: NotRequired[list[NonNegative]]


class PromptIds(TypedDict):
    """With `return_token_ids`: the prompt as the model would read it without a filter.

    In a stream the first chunk of a choice has it.
    """

    prompt_token_ids: NotRequired[list[NonNegative]]


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: those that the document cache had, so that they were not read again.

    `kept_tokens`, `protected_tokens`, `first_difference`: those of the filter reports.
    """

    cached_tokens: NonNegative
    kept_tokens: NonNegative
    protected_tokens: NonNegative
    first_difference: NotRequired[str]


class CompletionTokensDetails(TypedDict):
    """Tokens that prompt-lookup decoding has proposed, by whether they were drawn."""

    accepted_prediction_tokens: NonNegative
    rejected_prediction_tokens: NonNegative


class Usage(TypedDict):
    """`prompt_tokens` counts what was sent, not what the filter kept."""

    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    total_tokens: NonNegative
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class ReplyHead(TypedDict):
    """What the chunks of a stream have in common with each other, and with a whole reply."""

    id: str
    created: NonNegative
    model: str


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[NonNegative]


class CompletionText(AttentionExtras, TokenIds, PromptIds):
    index: NonNegative
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(CompletionText):
    finish_reason: FinishReason


class CompletionPart(CompletionText):
    finish_reason: FinishReason | None


class Completion(ReplyHead):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage
    filter: FilterObject | list[FilterObject]  # a list if there are several prompts


class ProgressObject(TypedDict):
    """`tokens` of `total` are read in this phase. `eta_ms`: until the first token, if known."""

    phase: Literal["queue", "filter", "prefill"]
    tokens: NonNegative
    total: NonNegative
    eta_ms: NonNegative | None


class PromptProgress(TypedDict):
    """The same as llama.cpp says it."""

    total: NonNegative
    cache: NonNegative
    processed: NonNegative
    time_ms: NonNegative


class ProgressExtras(TypedDict):
    """Chunks without choices have it while prompts are read, if it is requested."""

    progress: NotRequired[ProgressObject]
    prompt_progress: NotRequired[PromptProgress]


class ChunkExtras(ProgressExtras):
    """A choice's first chunk has its `filter`. Usage comes if it is requested: last, or always."""

    usage: NotRequired[Usage | None]
    filter: NotRequired[FilterObject]


class ReplyChunk(ReplyHead, ChunkExtras):
    pass


class CompletionChunk(ReplyChunk):
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


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class UrlPlace(TypedDict):
    """`url`: of the file on this server. `start_index`, `end_index`: the answer's characters."""

    url: str
    title: str
    start_index: NonNegative
    end_index: NonNegative


class UrlCitation(TypedDict):
    """Of chats, whose clients know no other kind."""

    type: Literal["url_citation"]
    url_citation: UrlPlace


class ChatMessage(TypedDict):
    """`annotations`: with `filter.citations`. `reasoning_content`: of an answer that thinks."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: None
    annotations: NotRequired[list[UrlCitation]]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(min_length=1)]]


class ChatChoice(AttentionExtras, TokenIds):
    index: NonNegative
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class Chat(ReplyHead, PromptIds):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    filter: FilterObject


class FunctionPart(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallPart(TypedDict):
    """A call's first part has its id, type and name."""

    index: NonNegative
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPart


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[CallPart], Field(min_length=1)]]
    annotations: NotRequired[list[UrlCitation]]


class ChatPart(AttentionExtras, TokenIds):
    index: NonNegative
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatChunk(ReplyChunk, PromptIds):
    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatPart], Field(max_length=1)]


class Selection(TypedDict):
    filter: FilterObject
    text: str
    usage: Usage


class Tokens(TypedDict):
    """With `return_offsets`: the `text` that was tokenized, and where in it each token begins."""

    count: NonNegative
    max_model_len: NonNegative
    tokens: list[NonNegative]
    token_strs: list[str] | None
    text: NotRequired[str]
    offsets: NotRequired[list[NonNegative]]


class Text(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """As in the model's `tokenizer_config.json`."""

    tokenizer_class: str
    vocab_size: NonNegative
    model_max_length: NonNegative
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
    created: NonNegative
    owned_by: Literal["gemserve"]
    max_model_len: NonNegative
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
    bytes: NonNegative
    positions: NonNegative
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
    """`cause`: of the engine's death, or why it is stuck.

    While the model is loaded and calibrated, something simpler answers: see `cli.loading_probe`.
    """

    status: Literal["dead", "stuck", "shutting down", "loading", "calibrating"]
    cause: NotRequired[str]


class Load(TypedDict):
    server_load: NonNegative


class ServerInfo(TypedDict):
    """`engine` and `server` are settings by their names, without those that name places."""

    version: str
    model: str
    attention_backend: str
    kernels: str
    max_model_len: NonNegative
    needs_key: bool
    has_libraries: bool
    is_calibrating: bool
    engine: dict[str, Any]
    server: dict[str, Any]


class GenerationSettings(TypedDict):
    n_ctx: NonNegative


class Modalities(TypedDict):
    vision: Literal[False]
    audio: Literal[False]


class Props(TypedDict):
    """`total_slots`: the most choices in progress at once. `model_path` is the model's name."""

    default_generation_settings: GenerationSettings
    total_slots: NonNegative
    model_path: str
    model_alias: str
    chat_template: str | dict[str, Any] | None
    bos_token: str | None
    eos_token: str | None
    modalities: Modalities
    build_info: str


class Version(TypedDict):
    """`attention_backend`: what evaluates attention; `kernels`: what runs the other operations."""

    version: str
    attention_backend: str
    kernels: Annotated[str, Field(description="triton or torch")]
