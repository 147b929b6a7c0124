"""The SDK's replies with gemserve's `filter` object, and the replies of gemserve's own endpoints.

`filter` is None if the server sent none. In a stream the first chunk of each choice has it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from openai import AsyncStream, BaseModel, Stream, types
from openai.types import chat

FilterReason = Literal[
    "short_prompt",
    "not_calibrated",
    "mostly_protected",
    "cached",
    "disabled",
    "prompt_logprobs",
    "diffuse_attention",
    "widened",
    "error",
]


class MessageReport(BaseModel):
    """What was kept of one message of a chat, and how many of its tokens are always read.

    `index` is the message's number, from 0; None for what the chat template writes beside the
    messages, with the tools and the calls.
    """

    index: int | None = None
    role: str
    tokens: int
    kept_tokens: int
    protected_tokens: int


class SearchReport(BaseModel):
    """What was searched for a question: the windows of libraries, with so many tokens.

    `candidates` windows were found, of which `read` were read. `ms`: of the search.
    """

    libraries: list[str]
    windows: int
    tokens: int
    candidates: int
    read: int
    ms: float


class SourceReport(BaseModel):
    """Where a kept passage is in a library: its file, and the place in it.

    `lines` and `pages` are the first and the last, from 1. `characters` is a half-open range.
    """

    library: str
    file: str
    heading: str | None = None
    lines: tuple[int, int] | None = None
    pages: tuple[int, int] | None = None
    characters: tuple[int, int]
    text: str


class FilterReport(BaseModel):
    """What the filter did.

    `protected_tokens` are always read, outside of `keep`: instructions, tools, calls, the question
    and the template. `added_tokens` separate kept passages that were not neighbours. `messages`
    says what was kept of each message of a chat. `first_difference` names the part of a chat in
    which it differs first from the most similar earlier one of its key.

    `selection` has the kept tokens as half-open ranges, if the request has `return_selection`.
    `coverage` is the share of the attention that the best sixteenth of the document got. It says
    how focused attention was; below `coverage_bound` a choice is not trusted. Some methods do not
    measure it. `window` is the most tokens of a
    window, `windows` how many the documents were cut into, of which the document cache had
    `cached_windows`; None if the prompt was read as one sequence, or whole. `reader` says which
    model looked, where the server has two. `searched`, `sources` and `found` are there if the
    request names libraries: what was searched, where each kept passage comes from, and whether
    anything seems to answer. `scores` are there if the request has `return_scores`; the server's
    documentation describes them.
    """

    method: str
    applied: bool
    reason: FilterReason | None = None
    layer: int | None = None
    prompt_tokens: int
    kept_tokens: int
    protected_tokens: int = 0
    added_tokens: int = 0
    first_difference: str | None = None
    cached_tokens: int
    filter_ms: float
    selection: list[list[int]] | None = None
    messages: list[MessageReport] | None = None
    coverage: float | None = None
    coverage_bound: float | None = None
    window: int | None = None
    windows: int | None = None
    cached_windows: int | None = None
    reader: Literal["self", "reader"] | None = None
    searched: SearchReport | None = None
    sources: list[SourceReport] | None = None
    found: bool | None = None
    scores: dict[str, Any] | None = None


class Progress(BaseModel):
    """How far the server has read the prompt: `tokens` of `total` in this phase.

    `phase` is "queue", "filter" or "prefill". `eta_ms` estimates the time until the first token;
    None if it is unknown.
    """

    phase: str
    tokens: int
    total: int
    eta_ms: int | None = None


class ChatCompletion(chat.ChatCompletion):
    filter: FilterReport | None = None


class ChatCompletionChunk(chat.ChatCompletionChunk):
    """A chunk with `progress` has no choices. It comes only if the request has `progress`."""

    filter: FilterReport | None = None
    progress: Progress | None = None


class Completion(types.Completion):
    """A whole reply or a chunk. In a whole reply to a list of prompts, `filter` is a list too.

    A chunk with `progress` has no choices. It comes only if the request has `progress`.
    """

    filter: FilterReport | list[FilterReport] | None = None
    progress: Progress | None = None


class Selection(BaseModel):
    """What a filter keeps of a prompt. `text` is the text of the kept tokens."""

    filter: FilterReport
    text: str
    usage: types.CompletionUsage


class CachedTokens(BaseModel):
    """`cached_tokens` of the documents were not read again."""

    cached_tokens: int


class RankingUsage(BaseModel):
    """`prompt_tokens`: of all documents, and of the query as often as it was read."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    """`index`: its place in the request. `relevance_score`: from 0 to 1."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Reranked(BaseModel):
    """Documents, the most relevant one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RankingUsage


class PairScore(BaseModel):
    """`index`: the pair's place in the request. `score`: from 0 to 1."""

    index: int
    score: float


class Scored(BaseModel):
    """The scores of all pairs, in their order."""

    id: str
    model: str
    data: list[PairScore]
    usage: RankingUsage


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


class Document(BaseModel):
    """A stored document.

    Times are Unix times in seconds. `status` is "warming" while the server reads the document in
    advance, then "ready", or "failed" with an `error`; it can be used in any case. `cached_tokens`
    counts the tokens that the document cache has now.
    """

    id: str
    name: str | None = None
    created_at: int
    expires_at: int
    bytes: int
    tokens: int
    status: Literal["warming", "ready", "failed"]
    error: str | None = None
    cached_tokens: int
    pinned: bool


# The SDK's reply types, and the types that this package builds instead.
TYPED: Final[dict[Any, Any]] = {
    chat.ChatCompletion: ChatCompletion,
    Stream[chat.ChatCompletionChunk]: Stream[ChatCompletionChunk],
    AsyncStream[chat.ChatCompletionChunk]: AsyncStream[ChatCompletionChunk],
    types.Completion: Completion,
    Stream[types.Completion]: Stream[Completion],
    AsyncStream[types.Completion]: AsyncStream[Completion],
}
