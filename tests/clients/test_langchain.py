"""LangChain's ChatOpenAI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.clients.servers import NOTES
from tests.fakes import FakeCore, kept_of
from tests.guide import examples, run_example

TEXT = "Héllo 🌍!"
CODE = """
import asyncio, openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

place = {"base_url": "http://127.0.0.1:8000/v1", "api_key": "none", "model": "builtin"}
model = ChatOpenAI(**place, max_retries=0)
reply = model.invoke([SystemMessage("Be brief."), HumanMessage("Hi")], max_tokens=7, stop=["x"])
assert reply.content == TEXT
assert reply.usage_metadata["output_tokens"] == 4
assert reply.response_metadata["finish_reason"] == "stop"
assert "".join(chunk.content for chunk in model.stream("Hi")) == TEXT
assert [each.content for each in model.batch(["Hi", "Ho"])] == [TEXT, TEXT]
assert asyncio.run(model.ainvoke("Hi")).content == TEXT
assert OpenAI(**place, max_retries=0).invoke("Hi") == TEXT
try:
    model.invoke("Hi", extra_body={"filter": {"keep": 3}})
except openai.BadRequestError as error:
    assert error.param == "filter.keep"
else:
    raise AssertionError
"""


@pytest.mark.capability("LangChain", "filter")
def test_the_guide(url: str, folder: Path, core: FakeCore) -> None:
    (code,) = examples("LangChain", "python")
    interpreter = python_of("langchain")
    printed = run_example(code, "python", url=url, folder=folder, interpreter=interpreter)
    kept = kept_of(core.requests[0])
    assert printed == f"{TEXT}\n{kept} tokens kept\n{TEXT}"
    first, second = (request.filter for request in core.requests)
    assert (first.method, first.keep, second.method) == ("sieve", 512, "gemfilter")


@pytest.mark.capability("LangChain", "chat", "stream", "errors")
def test_what_else_it_sends(url: str, folder: Path, core: FakeCore) -> None:
    code = f"TEXT = {TEXT!r}\n{CODE}"
    run_example(code, "python", url=url, folder=folder, interpreter=python_of("langchain"))
    sampling = core.requests[0].sampling
    assert (sampling.max_tokens, sampling.stop) == (7, ("x",))


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Typed answers and tools", "Answer\nAnswer\n"),
        ("The filter in front of another model", "48213"),
    ],
)
def test_its_subsections(builtin_url: str, tmp_path: Path, heading: str, expected: str) -> None:
    (tmp_path / "notes.txt").write_text(NOTES, encoding="utf-8")
    (code,) = examples(heading, "python")
    interpreter = python_of("langchain")
    printed = run_example(code, "python", url=builtin_url, folder=tmp_path, interpreter=interpreter)
    assert expected in printed
    assert len(printed) < len(NOTES) / 4
