"""Build the engine requests that read documents to rank them for a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemserve.api.requests.base_bodies import MAX_CHOICES
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import PromptTooLong, RequestError
from gemserve.filtering.planner import FilterPlanner
from gemserve.prompting.encoding import TokenLimit
from gemserve.prompting.ranked_texts import RankedTexts, query_ids, ranked_texts
from gemserve_library.ranking.bodies import WHOLE, RankingBody, RerankBody, ScoreBody

MAX_QUERY_TOKENS = 512  # the last `MAX_QUESTION_TOKENS` are watched
_MARGIN = 16  # tokens, within which a cut changes how a text is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Documents with one query, which one engine request reads.

    `places`: of each in the reply. `has_words`: the query's words count, too.
    """

    texts: RankedTexts
    places: Sequence[int]
    has_words: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRequests(EngineRequests):
    """A request for each ranking."""

    rankings: tuple[Ranking, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, and of a query as often as it is read."""
        return sum(
            len(request.prompt_ids) + len(ranking.texts.query) * _count_segments(request)
            for request, ranking in zip(self.requests, self.rankings, strict=True)
        )


@dataclass(frozen=True, slots=True)
class RankingBuilder:
    """Its methods are too slow for the event loop."""

    builder: RequestBuilder

    def build_rerank(
        self,
        body: RerankBody,
        request_id: str,
        adapter: LoadedAdapter | None = None,
        *,
        returns_documents: bool,
    ) -> RankingRequests:
        """`returns_documents`: what the reply does if the body does not say."""
        documents = body.texts
        fields = "query", "documents"
        texts = self._texts(body, body.query, documents, fields, body.max_tokens_per_doc)
        ranking = Ranking(
            texts=texts, places=range(len(documents)), has_words=body.lexical != "off"
        )
        echoes = documents if body.returns_documents(returns_documents) else ()
        return self._requests([ranking], request_id, adapter, body, fields, echoes)

    def build_score(
        self, body: ScoreBody, request_id: str, adapter: LoadedAdapter | None = None
    ) -> RankingRequests:
        fields = queries, _ = body.side_names
        pairs = body.pairs
        by_query: dict[str, list[int]] = {}
        for place, (query, _) in enumerate(pairs):
            by_query.setdefault(query, []).append(place)
        if len(by_query) > MAX_CHOICES:
            raise RequestError(
                f"{queries}: has {len(by_query)} different texts, the limit is {MAX_CHOICES}",
                param=queries,
            )
        rankings = [
            Ranking(
                texts=self._texts(body, query, [pairs[place][1] for place in places], fields),
                places=places,
                has_words=False,  # a pair's score must not depend on other pairs
            )
            for query, places in by_query.items()
        ]
        return self._requests(rankings, request_id, adapter, body, fields)

    def _texts(
        self,
        body: RankingBody,
        query: str,
        documents: Sequence[str],
        fields: tuple[str, str],
        most_each: int | None = None,
    ) -> RankedTexts:
        """`fields`: the names of those with the query and with the documents."""
        query_field, field = fields
        builder = self.builder
        asked = self._query(query, query_field)
        both = body.truncate_prompt_tokens
        if both is not None and both != WHOLE:
            if both <= len(asked):
                raise RequestError(
                    f"truncate_prompt_tokens={both}: must be more than the {len(asked)} tokens of "
                    f"{query_field}",
                    param="truncate_prompt_tokens",
                )
            most_each = min(both - len(asked), most_each or both)
        if most_each is not None:  # what is far behind need not be tokenized
            most_chars = (most_each + _MARGIN) * builder.longest_token_chars
            documents = [document[:most_chars] for document in documents]
        builder.check_chars(sum(map(len, documents)), field)
        limit = TokenLimit(builder.max_prompt_tokens, field)
        texts = ranked_texts(builder.tokenizer, query, documents, limit, most_each)
        if not texts.ids:
            raise RequestError(f"{field}: must not all be empty", param=field)
        return texts

    def _query(self, query: str, field: str) -> tuple[int, ...]:
        """The query's tokens. Raises `RequestError` if there are none, or too many."""
        fewest = len(query) // self.builder.longest_token_chars
        ids = () if fewest > MAX_QUERY_TOKENS else query_ids(self.builder.tokenizer, query)
        if max(fewest, len(ids)) > MAX_QUERY_TOKENS:
            count = f"{len(ids)}" if ids else f"at least {fewest}"
            raise RequestError(
                f"{field}: has {count} tokens, the limit of a query is {MAX_QUERY_TOKENS}",
                param=field,
                code="context_length_exceeded",
            )
        if not ids:
            raise RequestError(f"{field}: must not be blank", param=field)
        return ids

    def _requests(
        self,
        rankings: Sequence[Ranking],
        request_id: str,
        adapter: LoadedAdapter | None,
        body: RankingBody,
        fields: tuple[str, str],
        echoes: Sequence[str] = (),
    ) -> RankingRequests:
        requests: list[Request] = []
        for number, ranking in enumerate(rankings):
            request = reading_request(
                self.builder.planner,
                ranking.texts,
                request_id=request_id if len(rankings) == 1 else f"{request_id}-{number}",
                priority=body.priority or 0,
                adapter=adapter,
                field=fields[0],
            )
            requests.append(request)
        made = RankingRequests(
            requests=tuple(requests), rankings=tuple(rankings), echoes=tuple(echoes)
        )
        limit = self.builder.max_prompt_tokens
        if made.num_tokens > limit:
            raise PromptTooLong(tokens=made.num_tokens, limit=limit, param=fields[1], note=_AS_READ)
        return made


def reading_request(
    planner: FilterPlanner,
    texts: RankedTexts,
    *,
    request_id: str,
    priority: int = 0,
    adapter: LoadedAdapter | None = None,
    tenant: bytes = b"",
    field: str = "query",
) -> Request:
    """The request that reads documents, each with the query behind it, and ends then.

    Raises `RequestError`, naming `field` if the query is too long.
    """
    params, plan = planner.plan_documents(
        np.array(texts.ids, dtype=np.int64),
        texts.ranges,
        texts.breaks,
        anchor=texts.anchor,
        query=texts.query,
        end=texts.end,
        field=field,
        positions=0 if adapter is None else adapter.num_positions,
    )
    return Request(
        request_id=request_id,
        prompt_ids=texts.ids,
        sampling=SamplingParams(max_tokens=1),
        filter=params,
        priority=priority,
        summarizes_only=True,
        # an adapter is of the model that answers
        adapter=None if params.reader == "reader" else adapter,
        plan=plan,
        tenant=tenant,
    )


_AS_READ = ", counted with a query behind each document"


def _count_segments(request: Request) -> int:
    assert request.plan is not None
    assert request.plan.segments is not None
    return len(request.plan.segments.segments)
