"""The SDK's replies with gemserve's `filter` object, and the replies of gemserve's own endpoints.

`filter` is None if the server sent none. In a stream the first chunk of each choice has it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from openai import AsyncStream, BaseModel, Stream, types
from openai.types import chat

from gemserve_client.filters import FilterMethod

FilterReason = Literal[
    "short_prompt", "disabled", "prompt_logprobs", "diffuse_attention", "widened", "error"
]


class FilterReport(BaseModel):
    """What the filter did.

    `selection` has the kept tokens as half-open ranges, if the request has `return_selection`.
    `coverage` is the share of the attention that the best sixteenth of the document got. It says
    how focused attention was. Some methods do not measure it. `scores` are there if the request has
    `return_scores`; the server's documentation describes them.
    """

    method: FilterMethod
    applied: bool
    reason: FilterReason | None = None
    layer: int | None = None
    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    filter_ms: float
    selection: list[list[int]] | None = None
    coverage: float | None = None
    scores: dict[str, Any] | None = None


class ChatCompletion(chat.ChatCompletion):
    filter: FilterReport | None = None


class ChatCompletionChunk(chat.ChatCompletionChunk):
    filter: FilterReport | None = None


class Completion(types.Completion):
    """A whole reply or a chunk. In a whole reply to a list of prompts, `filter` is a list too."""

    filter: FilterReport | list[FilterReport] | None = None


class Selection(BaseModel):
    """What a filter keeps of a prompt. `text` is the text of the kept tokens."""

    filter: FilterReport
    text: str
    usage: types.CompletionUsage


class Adapter(BaseModel):
    """An adapter that requests can name.

    It takes `positions` of the context, and `bytes` of the server's memory while it is `loaded`.
    The server loads an adapter that is not loaded when a request names it. `parent` is the model.
    """

    id: str
    name: str
    path: str
    type: str
    version: str
    bytes: int
    positions: int
    loaded: bool
    parent: str


# The SDK's reply types, and the types that this package builds instead.
TYPED: Final[dict[Any, Any]] = {
    chat.ChatCompletion: ChatCompletion,
    Stream[chat.ChatCompletionChunk]: Stream[ChatCompletionChunk],
    AsyncStream[chat.ChatCompletionChunk]: AsyncStream[ChatCompletionChunk],
    types.Completion: Completion,
    Stream[types.Completion]: Stream[Completion],
    AsyncStream[types.Completion]: AsyncStream[Completion],
}
