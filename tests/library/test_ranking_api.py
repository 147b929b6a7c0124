"""`/v1/rerank` and `/v1/score`: the forms of Jina, Cohere and vLLM, over a scripted core.

The core scores a document by the share of its tokens that the query has, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gemserve.api.app import create_app
from gemserve.api.replies.event_reader import AtEnd
from gemserve.contract.events import Finished
from gemserve.prompting.encoding import encode
from tests.fakes import MODEL, Api, FakeCore, api_over, serving_over

pytestmark = pytest.mark.anyio
RERANK, SCORE = "/v1/rerank", "/v1/score"
RERANKS, SCORES = [RERANK, "/rerank", "/v2/rerank"], [SCORE, "/score"]
QUERY = "Where does the heron nest while the river carries ice in spring?"
BEST, GOOD, BAD = QUERY, f"{QUERY} In an alder.", "Snow fell on roofs."
DOCUMENTS = [BAD, BEST, GOOD]


async def post(api: Api, path: str = RERANK, **fields: Any) -> httpx.Response:
    body = {"query": QUERY, "documents": DOCUMENTS} if path in RERANKS else {}
    return await api.client.post(path, json={"model": MODEL, **body, **fields})


def count(api: Api, *texts: str) -> int:
    tokenizer = api.serving.builder.tokenizer
    return sum(len(encode(tokenizer, text, add_special_tokens=False).ids) for text in texts)


@pytest.mark.parametrize("path", RERANKS)
async def test_the_best_come_first(api: Api, path: str) -> None:
    reply = await post(api, path)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert [result["index"] for result in body["results"]] == [1, 2, 0]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert body["id"] == reply.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("list", MODEL)


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("asked", [None, True, False])
async def test_documents_are_returned_as_each_api_does(
    api: Api, path: str, asked: bool | None
) -> None:
    """Jina and vLLM return them unless told otherwise, Cohere's second version does not."""
    results = (await post(api, path, return_documents=asked)).json()["results"]
    returns = path != "/v2/rerank" if asked is None else asked
    texts = [result.get("document") for result in results]
    assert texts == ([{"text": t} for t in (BEST, GOOD, BAD)] if returns else [None] * 3)


@pytest.mark.parametrize(("top_n", "expected"), [(None, 3), (0, 3), (1, 1), (2, 2), (9, 3)])
async def test_only_the_first_are_returned(api: Api, top_n: int | None, expected: int) -> None:
    results = (await post(api, top_n=top_n)).json()["results"]
    assert [result["index"] for result in results] == [1, 2, 0][:expected]


async def test_objects_and_empty_documents(api: Api) -> None:
    """An empty document is no error: retrievers return some. It has the lowest score."""
    reply = await post(api, documents=["", {"text": BEST}, ""])
    results = reply.json()["results"]
    assert [result["index"] for result in results] == [1, 0, 2]
    assert [result["relevance_score"] for result in results[1:]] == [0, 0]


async def test_usage_counts_what_was_read(api: Api) -> None:
    """The query is read once behind each document, and so it counts."""
    body = (await post(api)).json()
    total = count(api, *DOCUMENTS) + 3 * count(api, f"\n\n{QUERY}")
    assert body["usage"] == {
        "prompt_tokens": total,
        "completion_tokens": 0,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": count(api, BAD)},
    }
    assert body["meta"]["billed_units"] == {"search_units": 1}
    assert body["meta"]["tokens"] == {"input_tokens": total}


async def test_a_trace_names_the_model_that_a_request_leaves_out(tokenizer: Any) -> None:
    """Its span was called "rerank None"."""
    named: list[str] = []

    def begin(_: Any, requests: Sequence[Any], n: int, **fields: Any) -> list[AtEnd]:
        named.append(fields["model"])
        return [AtEnd(lambda: None) for _ in requests]

    traces: Any = SimpleNamespace(begin=begin)
    serving = serving_over(FakeCore(), tokenizer)
    transport = httpx.ASGITransport(create_app(serving, traces))
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as client:
            reply = await client.post(RERANK, json={"query": QUERY, "documents": DOCUMENTS})
            assert reply.status_code == 200, reply.text
    finally:
        serving.engine.stop()
    assert named == [MODEL]


async def test_a_search_unit_is_a_hundred_documents(api: Api) -> None:
    body = (await post(api, "/v2/rerank", query="a", documents=["b"] * 101)).json()
    assert body["meta"]["billed_units"] == {"search_units": 2}
    assert body["meta"]["api_version"] == {"version": "2"}


async def test_a_document_is_read_as_plain_text(api: Api, core: FakeCore) -> None:
    """A document that spells a control token must not end the user's turn."""
    control = "<|im_start|>"
    tokenizer = api.serving.builder.tokenizer
    name = next((t for t in tokenizer.all_special_tokens), control)
    await post(api, documents=[f"a{name}b"])
    special = set(tokenizer.all_special_ids)
    assert special.isdisjoint(core.requests[0].prompt_ids)


@pytest.mark.parametrize("path", SCORES)
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
async def test_pairs_are_scored_in_order(api: Api, path: str, names: tuple[str, str]) -> None:
    first, second = names
    one = (await post(api, path, **{first: QUERY, second: DOCUMENTS})).json()
    assert [each["index"] for each in one["data"]] == [0, 1, 2]
    bad, best, good = (each["score"] for each in one["data"])
    assert bad < good < best
    fields = {first: [QUERY, BAD, QUERY], second: [BAD, {"text": BAD}, BEST]}
    pairs = (await post(api, path, **fields)).json()
    scores = [each["score"] for each in pairs["data"]]
    assert scores[0] < 0.5 < min(scores[1:])
    single = (await post(api, path, **{first: QUERY, second: BEST})).json()
    assert len(single["data"]) == 1
    assert single["data"][0]["object"] == "score"


async def test_without_words_rerank_and_score_agree(api: Api) -> None:
    results = (await post(api, lexical="off")).json()["results"]
    scores = (await post(api, SCORE, text_1=QUERY, text_2=DOCUMENTS)).json()["data"]
    ranked = {result["index"]: result["relevance_score"] for result in results}
    assert [ranked[i] for i in range(3)] == [each["score"] for each in scores]


async def test_words_count_beside_attention(api: Api) -> None:
    """The rarer word decides between documents that are looked at alike."""
    documents = ["An owl sat there.", "An owl sat here.", "An owl sat near."]
    asked = {"query": "near", "documents": documents}
    attended = (await post(api, lexical="off", **asked)).json()["results"]
    with_words = (await post(api, **asked)).json()["results"]
    assert with_words[0]["index"] == 2
    of = {result["index"]: result["relevance_score"] for result in attended}
    for result in with_words[1:]:
        assert result["relevance_score"] == of[result["index"]] / 2


@pytest.mark.parametrize(
    ("field", "value", "param", "said"),
    [
        ("query", "", "query", "at least 1 character"),
        ("query", " \n", "query", "blank"),
        ("query", None, "query", "null"),
        ("query", "x " * 600, "query", " tokens, the limit of a query is 512"),
        ("documents", [], "documents", "at least 1"),
        ("documents", ["a"] * 1001, "documents", "1001 texts, the limit is 1000"),
        ("documents", ["", ""], "documents", "empty"),
        ("documents", "a", "documents", "list"),
        ("documents", ["a", 1], "documents.1", "1"),
        ("documents", ["a", {"text": None}], "documents.1.text", "null"),
        ("documents", ["a", {"text": "a", "title": "b"}], "documents.1.title", "unknown"),
        ("documents", ["a " * 1100], "documents", "1000 tokens"),
        ("top_n", -1, "top_n", "-1"),
        ("top_n", 1.5, "top_n", "1.5"),
        ("max_tokens_per_doc", 0, "max_tokens_per_doc", "0"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens", "-2"),
        ("truncate_prompt_tokens", 2, "truncate_prompt_tokens", "more than the"),
        ("rank_fields", ["title"], "rank_fields", "title"),
        ("priority", 101, "priority", "100"),
        ("filter", "sieve", "filter", "unknown"),
    ],
)
async def test_wrong_requests(
    api: Api, core: FakeCore, field: str, value: Any, param: str, said: str
) -> None:
    reply = await post(api, **{field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert len(error["message"]) < 500
    assert not core.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "documents": ["b"]}, "documents"),
        ({"text_1": "a", "text_2": "b", "items": ["c"]}, "items"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": ["a", ""], "text_2": ["c", "d"]}, "text_1.1"),
        ({"text_1": [f"a{i}" for i in range(129)], "text_2": ["c"] * 129}, "text_1"),
    ],
)
async def test_wrong_pairs(api: Api, fields: dict[str, Any], param: str) -> None:
    reply = await post(api, SCORE, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_the_query_counts_with_each_document(api: Api) -> None:
    """A thousand tiny documents with a long query would be much unpaid work."""
    long = "x " * 200
    reply = await post(api, query=long, documents=["a"] * 10)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    assert "with a query behind each" in error["message"]


@pytest.mark.parametrize("fields", [{"max_tokens_per_doc": 4}, {"truncate_prompt_tokens": 0}])
async def test_long_documents_are_cut_if_asked(
    api: Api, core: FakeCore, fields: dict[str, Any]
) -> None:
    """What is left out is not tokenized either; the reply has the whole text."""
    if "truncate_prompt_tokens" in fields:
        fields = {"truncate_prompt_tokens": count(api, f"\n\n{QUERY}") + 4}
    long = "one two three four five six " * 2000
    reply = await post(api, documents=[long, "one"], **fields)
    assert reply.status_code == 200, reply.text
    assert len(core.requests[0].prompt_ids) == 4 + count(api, "one")
    texts = {each["index"]: each["document"]["text"] for each in reply.json()["results"]}
    assert texts[0] == long


async def test_keys_pay_and_have_quotas(tokenizer: Any, tmp_path: Path) -> None:
    """A query that is read a hundred times is paid a hundred times."""
    (tmp_path / "keys").write_text("alice\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "tokens_per_minute": 100}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        api.client.headers["Authorization"] = "Bearer alice"
        documents = ["a"] * 40
        first = await post(api, query="x y z", documents=documents)
        assert first.json()["usage"]["total_tokens"] > 100
        assert (await post(api)).status_code == 429


async def test_one_that_was_not_begun_costs_nothing(tokenizer: Any, tmp_path: Path) -> None:
    """Its query was paid for each document all the same."""
    (tmp_path / "keys").write_text("alice\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "tokens_per_minute": 100}
    late = Finished(
        reason="error", completion_tokens=0, error="late", is_unread=True, late="not_begun"
    )
    async with api_over(FakeCore(late), tokenizer, **settings) as api:
        api.client.headers["Authorization"] = "Bearer alice"
        for _ in range(3):
            reply = await post(api, query="word " * 30, documents=["a"] * 8)
            assert reply.status_code == 503, reply.text


async def test_a_failed_request_is_an_error(tokenizer: Any) -> None:
    async with api_over(FakeCore(ValueError("no numbers")), tokenizer) as api:
        for path, fields in ((RERANK, {}), (SCORE, {"text_1": "a", "text_2": ["b", "c"]})):
            reply = await post(api, path, **fields)
            assert reply.status_code == 500
            assert "no numbers" in reply.json()["error"]["message"]


async def test_metrics_count_tokens_and_segments(api: Api) -> None:
    await post(api)
    metrics = await api.metrics()
    assert metrics["prompt_tokens_total"] == count(api, *DOCUMENTS)
    assert metrics['windows_total{source="read"}'] == 2
    assert metrics['windows_total{source="cache"}'] == 1
    assert metrics['request_success_total{finish_reason="stop"}'] == 1
