"""Cohere's own client, both of its versions, as a reranker."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environments import python_of
from tests.fakes import FakeCore
from tests.guide import run_example

QUERY = "Where does the heron nest while the river carries ice in spring?"
DOCUMENTS = ["Snow fell on roofs.", QUERY, f"{QUERY} In an alder."]
CODE = f"""
import cohere

QUERY, DOCUMENTS = {QUERY!r}, {DOCUMENTS!r}
place = {{"api_key": "none", "base_url": "http://127.0.0.1:8000"}}
asked = {{"model": "builtin", "query": QUERY, "documents": DOCUMENTS}}
newer, older = cohere.ClientV2(**place), cohere.Client(**place)

reply = newer.rerank(**asked)
assert [result.index for result in reply.results] == [1, 2, 0]
assert all(0 <= result.relevance_score <= 1 for result in reply.results)
assert reply.meta.billed_units.search_units == 1
assert len(newer.rerank(**asked, top_n=2, max_tokens_per_doc=64, priority=1).results) == 2
reply = older.rerank(**asked, return_documents=True, top_n=1)
assert reply.results[0].document.text == QUERY
assert older.rerank(**asked, return_documents=False).results[0].document is None
try:
    newer.rerank(model="builtin", query=QUERY, documents=[])
except cohere.BadRequestError as error:
    assert error.body["error"]["param"] == "documents"
else:
    raise AssertionError
"""


def test_both_versions_of_the_client(url: str, folder: Path, core: FakeCore) -> None:
    run_example(CODE, "python", url=url, folder=folder, interpreter=python_of("cohere"))
    assert [request.summarizes_only for request in core.requests] == [True] * 4
