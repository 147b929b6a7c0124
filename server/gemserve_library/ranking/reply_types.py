"""The JSON of the replies of /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.replies.reply_types import NonNegative

Score = Annotated[float, Field(ge=0, le=1)]


class CachedTokens(TypedDict):
    """`cached_tokens`: of documents that were not read again."""

    cached_tokens: NonNegative


class RankingUsage(TypedDict):
    """`prompt_tokens`: of all documents, and of the query as often as it was read."""

    prompt_tokens: NonNegative
    completion_tokens: Literal[0]
    total_tokens: NonNegative
    prompt_tokens_details: CachedTokens


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    """`index`: the document's place in the request. `document`: with `return_documents`."""

    index: NonNegative
    relevance_score: Score
    document: NotRequired[RankedText]


class ApiVersion(TypedDict):
    version: str


class BilledUnits(TypedDict):
    """As Cohere counts: a search unit is a query with up to 100 documents."""

    search_units: NonNegative


class MetaTokens(TypedDict):
    input_tokens: NonNegative


class RerankMeta(TypedDict):
    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: MetaTokens


class Reranked(TypedDict):
    """The documents, the most relevant first. `usage` is Jina's and vLLM's, `meta` Cohere's."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: RankingUsage
    meta: RerankMeta


class PairScore(TypedDict):
    """`index`: the pair's place in the request."""

    index: NonNegative
    object: Literal["score"]
    score: Score


class Scored(TypedDict):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: NonNegative
    model: str
    data: list[PairScore]
    usage: RankingUsage
