"""`/v1/rerank` and `/v1/score`: how relevant documents are to a query, without another model.

The paths are those of Jina (`/v1/rerank`), Cohere (`/v2/rerank`) and vLLM (also without a version).
"""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from gemserve.api.access.request_id import request_id_of
from gemserve.api.error_replies import Error
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter
from gemserve_library.ranking.bodies import RerankBody, ScoreBody
from gemserve_library.ranking.reply import (
    ReadDocuments,
    read_documents,
    rerank_reply,
    score_reply,
)
from gemserve_library.ranking.reply_types import Reranked, Scored
from gemserve_library.ranking.requests import RankingBuilder, RankingRequests

_DOCUMENTS = ["The heron nests in the alder.", "The mill was sold in May."]
RERANK = Operation(
    summary="Order documents by their relevance to a query",
    body=RerankBody,
    example={"query": "Where does the heron nest?", "documents": _DOCUMENTS, "top_n": 1},
    reply=Reranked,
    unavailable=Error,
)
SCORE = Operation(
    summary="Score pairs of a query and a document",
    body=ScoreBody,
    example={"text_1": "Where does the heron nest?", "text_2": _DOCUMENTS},
    reply=Scored,
    unavailable=Error,
)


def ranking_routes(submitter: Submitter, builder: RequestBuilder) -> Routes:
    routes = Routes()
    rankings = RankingBuilder(builder)

    async def rerank(http: Request, version: str) -> Response:
        # Cohere's second version never returns documents, the others do unless told otherwise
        returns = version != "2"
        build = partial(rankings.build_rerank, returns_documents=returns)
        submission = await submitter.submit(http, RerankBody, build)
        requests, body = submission.requests, submission.body
        assert isinstance(requests, RankingRequests)
        read = await read_documents(submission.reader, requests)
        if not isinstance(read, ReadDocuments):
            return read
        return await rerank_reply(
            read,
            request_id=request_id_of(http),
            model=body.model or submitter.models.model,
            texts=body.texts,
            top_n=body.top_n,
            returns_documents=body.returns_documents(returns),
            version=version,
        )

    @routes.add("POST", "/v1/rerank", RERANK)
    async def post_rerank(http: Request) -> Response:
        return await rerank(http, "1")

    @routes.add("POST", "/rerank", RERANK)
    async def post_plain_rerank(http: Request) -> Response:
        return await rerank(http, "1")

    @routes.add("POST", "/v2/rerank", RERANK)
    async def post_second_rerank(http: Request) -> Response:
        return await rerank(http, "2")

    async def score(http: Request) -> Response:
        submission = await submitter.submit(http, ScoreBody, rankings.build_score)
        requests, body = submission.requests, submission.body
        assert isinstance(requests, RankingRequests)
        read = await read_documents(submission.reader, requests)
        if not isinstance(read, ReadDocuments):
            return read
        return await score_reply(
            read, request_id=request_id_of(http), model=body.model or submitter.models.model
        )

    @routes.add("POST", "/v1/score", SCORE)
    async def post_score(http: Request) -> Response:
        return await score(http)

    @routes.add("POST", "/score", SCORE)
    async def post_plain_score(http: Request) -> Response:
        return await score(http)

    return routes
