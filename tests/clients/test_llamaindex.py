"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.fakes import FakeCore, kept_of
from tests.guide import examples, run_example

TEXT = "Héllo 🌍!"
CODE = """
import asyncio, openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

place = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none", "model": "builtin"}
model = OpenAILike(**place, is_chat_model=True, max_tokens=7, max_retries=0)
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")]
assert model.chat(messages).message.content == TEXT
assert "".join(part.delta for part in model.stream_chat(messages)) == TEXT
assert asyncio.run(model.achat(messages)).message.content == TEXT
text = OpenAILike(**place, is_chat_model=False, max_tokens=7, max_retries=0)
assert text.complete("Hi").text == TEXT
try:
    model.complete("Hi", extra_body={"filter": {"keep": 3}})
except openai.BadRequestError as error:
    assert error.param == "filter.keep"
else:
    raise AssertionError
"""


@pytest.mark.capability("LlamaIndex", "filter")
def test_the_guide(url: str, folder: Path, core: FakeCore) -> None:
    (code,) = examples("LlamaIndex", "python")
    interpreter = python_of("llamaindex")
    printed = run_example(code, "python", url=url, folder=folder, interpreter=interpreter)
    kept = kept_of(core.requests[0])
    assert printed == f"{TEXT}\n{kept} tokens kept\n{TEXT}"
    assert [(r.filter.method, r.filter.keep) for r in core.requests] == [("sieve", 512)] * 2


@pytest.mark.capability("LlamaIndex", "chat", "stream", "errors")
def test_what_else_it_sends(url: str, folder: Path, core: FakeCore) -> None:
    code = f"TEXT = {TEXT!r}\n{CODE}"
    run_example(code, "python", url=url, folder=folder, interpreter=python_of("llamaindex"))
    assert core.requests[0].sampling.max_tokens == 7


RERANK = """
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.jinaai_rerank import JinaRerank

query = "Where does the heron nest while the river carries ice in spring?"
nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("Snow fell on roofs.", query)]
place = {"base_url": "http://127.0.0.1:8000/v1", "api_key": "none", "model": "builtin"}
best = JinaRerank(**place, top_n=1).postprocess_nodes(nodes, QueryBundle(query))
assert [node.text for node in best] == [query]
assert 0 < best[0].score <= 1
"""


def test_it_reranks_as_jinas_api_does(url: str, folder: Path) -> None:
    run_example(RERANK, "python", url=url, folder=folder, interpreter=python_of("llamaindex"))
