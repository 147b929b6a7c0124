"""The SDK's request fields with `filter`, `adapter`, `document` and, of streams, `progress`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required

from openai import Timeout
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from typing_extensions import TypedDict  # the SDK uses these, and its classes are extended here

from gemserve_client.filters import FilterParam


class _Extras(TypedDict, total=False):
    filter: FilterParam | None
    adapter: str | None
    extra_headers: Mapping[str, str] | None
    extra_query: Mapping[str, object] | None
    extra_body: Mapping[str, object] | None
    timeout: float | Timeout | None


class ChatRequest(chat_create_params.CompletionCreateParamsNonStreaming, _Extras): ...


class _StreamExtras(_Extras, total=False):
    progress: bool | None


class ChatStreamRequest(chat_create_params.CompletionCreateParamsStreaming, _StreamExtras): ...


class _PromptExtras(_Extras, total=False):
    document: str | None  # the id of a stored document, which stands in front of the prompt


class CompletionRequest(
    completion_create_params.CompletionCreateParamsNonStreaming, _PromptExtras
): ...


class CompletionStreamRequest(
    completion_create_params.CompletionCreateParamsStreaming, _PromptExtras, _StreamExtras
): ...


class SelectionRequest(TypedDict, total=False):
    """The fields of a filter request, which has either a prompt or messages."""

    model: Required[str]
    prompt: str | Sequence[int]
    document: str | None
    messages: Sequence[chat.ChatCompletionMessageParam]
    filter: FilterParam | None
    adapter: str | None


class RerankRequest(TypedDict, total=False):
    """The fields of a request to order `documents` by the `query`.

    The reply has the `top_n` best ones, or all, with their texts if `return_documents`. No more
    than `max_tokens_per_doc` of each are read. `lexical` "off": the query's words do not count.
    """

    query: Required[str]
    documents: Required[Sequence[str]]
    model: str
    top_n: int
    return_documents: bool
    max_tokens_per_doc: int
    lexical: Literal["auto", "off"]
    adapter: str | None


class ScoreRequest(TypedDict, total=False):
    """The fields of a request for scores of pairs: one of `text_1` with each of `text_2`, or as
    many of one as of the other.
    """

    text_1: Required[str | Sequence[str]]
    text_2: Required[str | Sequence[str]]
    model: str
    adapter: str | None


def with_ours(request: dict[str, Any]) -> dict[str, Any]:
    """Move our fields to `extra_body`, where the SDK takes fields it does not know.

    `progress` becomes an option of the stream.
    """
    if request.pop("progress", None):
        options = {**(request.get("stream_options") or {}), "include_progress": True}
        request = {**request, "stream_options": options}
    ours = {name: request.pop(name, None) for name in ("filter", "adapter", "document")}
    given = {name: value for name, value in ours.items() if value is not None}
    if not given:
        return request
    return {**request, "extra_body": {**(request.get("extra_body") or {}), **given}}
