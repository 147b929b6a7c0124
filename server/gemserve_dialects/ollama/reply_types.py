"""The JSON of Ollama's endpoints: the models, answers, and the lines of streams."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.replies.reply_types import FilterObject, NonNegative
from gemserve_dialects.ollama.errors import OllamaError

DoneReason = Literal["stop", "length"]


class CalledFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class Call(TypedDict):
    id: str
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class LineHead(TypedDict):
    """`filter` is in the first line of a stream that says something about the prompt."""

    model: str
    created_at: str
    done: bool
    filter: NotRequired[FilterObject]


class Statistics(TypedDict):
    """Of the last line. Durations are in nanoseconds."""

    done_reason: DoneReason
    total_duration: NonNegative
    load_duration: NonNegative
    prompt_eval_count: NonNegative
    prompt_eval_duration: NonNegative
    eval_count: NonNegative
    eval_duration: NonNegative


class ChatPart(LineHead):
    message: ChatMessage


class ChatAnswer(ChatPart, Statistics):
    pass


class Loaded(TypedDict):
    """The reply to a request without a prompt."""

    done_reason: Literal["load", "unload"]


class LoadedChat(ChatPart, Loaded):
    pass


class GeneratedPart(LineHead):
    response: str
    thinking: NotRequired[str]


class GeneratedAnswer(GeneratedPart, Statistics):
    pass


class LoadedPrompt(GeneratedPart, Loaded):
    pass


# The last one is an answer or an error.
ChatLine = ChatPart | ChatAnswer | OllamaError
GeneratedLine = GeneratedPart | GeneratedAnswer | OllamaError


class Version(TypedDict):
    """`version`: the release of Ollama whose protocol is meant. `gemserve`: this server's own."""

    version: str
    gemserve: str


class Details(TypedDict):
    """What is not known is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    """`size` and `digest` are not known."""

    name: str
    model: str
    modified_at: str
    size: Literal[0]
    digest: Literal[""]
    details: Details


class ModelList(TypedDict):
    models: list[ListedModel]


class ShownModel(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools"]]
    modified_at: str
