"""The replies of /v1/rerank and /v1/score: how relevant documents are to a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from anyio import to_thread
from fastapi import Response

from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import ABORTED, failure_response, is_failure
from gemserve.api.replies.large_replies import CHARS_PER_SCORED, json_reply
from gemserve.contract.events import Finished, SegmentsRead
from gemserve_library.ranking.reply_types import RankedDocument, RankingUsage, Reranked, Scored
from gemserve_library.ranking.requests import RankingRequests
from gemserve_library.ranking.scores import attention_scores, relevance, word_shares

_PER_UNIT = 100  # documents


@dataclass(frozen=True, slots=True)
class ReadDocuments:
    """What came of all documents of a request. `scores`: 0 to 1, in the order of the request."""

    scores: Sequence[float]
    usage: RankingUsage


async def read_documents(
    reader: EventReader, requests: RankingRequests
) -> ReadDocuments | Response:
    """The scores, or the reply of a request that has failed."""
    finished = [ABORTED] * len(requests.requests)
    async with aclosing(reader.events()) as arrivals:
        async for index, event in arrivals:
            if isinstance(event, Finished):
                finished[index] = event
                if is_failure(event):
                    return failure_response(event)
    read = [each.segments_read for each in finished]
    whole = [each for each in read if each is not None]
    if len(whole) < len(read):
        return failure_response(ABORTED)
    scores = await to_thread.run_sync(_scores, requests, whole)
    return ReadDocuments(scores, _usage(requests, whole))


def _scores(requests: RankingRequests, read: Sequence[SegmentsRead]) -> list[float]:
    """The scores of all documents, by their places in the reply."""
    scores: dict[int, float] = {}
    for ranking, request, segments in zip(requests.rankings, requests.requests, read, strict=True):
        assert request.plan is not None
        assert request.plan.segments is not None
        texts = ranking.texts
        found = attention_scores(request.plan.segments.segments, segments.summaries, texts.ranges)
        if ranking.has_words:
            found = relevance(found, word_shares(texts.words, texts.ranges))
        scores.update(zip(ranking.places, found.tolist(), strict=True))
    return [scores[place] for place in range(len(scores))]


def _usage(requests: RankingRequests, read: Sequence[SegmentsRead]) -> RankingUsage:
    return {
        "prompt_tokens": requests.num_tokens,
        "completion_tokens": 0,
        "total_tokens": requests.num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in read)},
    }


async def rerank_reply(
    read: ReadDocuments,
    *,
    request_id: str,
    model: str,
    texts: Sequence[str],
    top_n: int | None,
    returns_documents: bool,
    version: str,
) -> Response:
    """The best `top_n` documents, or all; of equal ones the earlier is first."""
    order = sorted(range(len(read.scores)), key=lambda place: -read.scores[place])
    best = order[: top_n or None]

    def result(place: int) -> RankedDocument:
        shown: RankedDocument = {"index": place, "relevance_score": read.scores[place]}
        if returns_documents:
            shown["document"] = {"text": texts[place]}
        return shown

    def content() -> Reranked:
        return {
            "id": request_id,
            "object": "list",
            "model": model,
            "results": [result(place) for place in best],
            "usage": read.usage,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"search_units": -(-len(texts) // _PER_UNIT)},
                "tokens": {"input_tokens": read.usage["prompt_tokens"]},
            },
        }

    num_chars = sum(len(texts[place]) for place in best) if returns_documents else 0
    return await json_reply(content, {}, len(best) // 4 + num_chars // CHARS_PER_SCORED)


async def score_reply(read: ReadDocuments, *, request_id: str, model: str) -> Response:
    def content() -> Scored:
        return {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": place, "object": "score", "score": score}
                for place, score in enumerate(read.scores)
            ],
            "usage": read.usage,
        }

    return await json_reply(content, {}, len(read.scores) // 4)
