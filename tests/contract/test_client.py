"""gemserve_client against a real socket: what it adds to the SDK, and that the SDK still works."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import openai
import pytest

import gemserve_client
from gemserve.contract import filter_plan, reports
from gemserve.engine.sequence.progress import Progress as ServerProgress
from gemserve.filtering.methods import SERVED_METHODS
from gemserve_client import (
    AsyncGemserveClient,
    Filter,
    FilterReport,
    GemserveClient,
    replies,
)
from tests.fakes import FILTERED, FakeCore, live_server, serving_over

TEXT = "Héllo 🌍!"
IDS = list(range(10, 210))
MESSAGES: Any = [{"role": "user", "content": "word " * 200}]
FILTER: Filter = {"method": "gemfilter", "keep": 32, "return_selection": True}


@pytest.fixture
def url(core: FakeCore, tokenizer: Any) -> Iterator[str]:
    with live_server(serving_over(core, tokenizer)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[GemserveClient]:
    with GemserveClient(base_url=url, max_retries=0, timeout=10) as opened:
        yield opened


@pytest.fixture
async def patient(url: str) -> Any:
    async with AsyncGemserveClient(base_url=url, max_retries=0, timeout=10) as opened:
        yield opened


def check(report: object, prompt_tokens: int = 200) -> None:
    assert isinstance(report, FilterReport)
    assert (report.method, report.applied, report.reason) == ("gemfilter", True, None)
    assert (report.prompt_tokens, report.kept_tokens) == (prompt_tokens, 32)
    assert report.selection == [[0, 32]]
    assert report.filter_ms == 1.5


def test_a_reply_carries_its_report(client: GemserveClient, core: FakeCore) -> None:
    chat = client.chat.completions.create(model="fake", messages=MESSAGES, filter=FILTER)
    assert chat.choices[0].message.content == TEXT
    assert chat.usage is not None
    check(chat.filter, chat.usage.prompt_tokens)
    text = client.completions.create(model="fake", prompt=IDS, filter=FILTER)
    assert text.choices[0].text == TEXT
    check(text.filter)
    sent = [request.filter for request in core.requests]
    assert sent[0] == sent[1]
    assert (sent[0].method, sent[0].keep) == ("gemfilter", 32)


def test_a_stream_carries_it_in_its_first_chunk(client: GemserveClient) -> None:
    with client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, filter=FILTER
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert isinstance(chunks[0].filter, FilterReport)
    assert {chunk.filter for chunk in chunks[1:]} == {None}
    with client.completions.create(model="fake", prompt=IDS, stream=True, filter=FILTER) as texts:
        parts = list(texts)
    assert "".join(part.choices[0].text for part in parts) == TEXT
    check(parts[0].filter)


def test_shorthand_default_and_other_extra_fields(client: GemserveClient, core: FakeCore) -> None:
    """A `filter` must not push out what else is in `extra_body`, nor None reach the server."""
    top_k: Any = {"top_k": 3}
    client.completions.create(model="fake", prompt=IDS, filter="none", extra_body=top_k)
    client.completions.create(model="fake", prompt=IDS, filter=None, extra_body=top_k)
    assert [request.filter.method for request in core.requests] == ["none", "sieve"]
    assert [request.sampling.top_k for request in core.requests] == [3, 3]


def test_heads_reach_the_server(client: GemserveClient, core: FakeCore) -> None:
    given: Filter = {"keep": 32, "heads": [(2, 0), (1, 7)]}
    client.filter(model="fake", prompt=IDS, filter=given)
    assert core.requests[0].filter.heads == ((2, 0), (1, 7))
    with pytest.raises(openai.BadRequestError, match="head 8 of layer 1 must be from 0 to 7"):
        client.filter(model="fake", prompt=IDS, filter={"heads": [[1, 8]]})


def test_a_window_reaches_the_server(client: GemserveClient, core: FakeCore) -> None:
    for window in (512, "off", "auto"):
        given: Filter = {"keep": 32, "window": window}  # type: ignore[typeddict-item]
        client.filter(model="fake", prompt=IDS, filter=given)
        assert core.requests[-1].filter.window == window
    with pytest.raises(openai.BadRequestError, match=r"filter\.window=5: must be a count of"):
        client.filter(model="fake", prompt=IDS, filter={"window": 5})


@pytest.mark.parametrize("method", SERVED_METHODS)
def test_every_method_can_be_named(client: GemserveClient, core: FakeCore, method: str) -> None:
    """The client has no list of them, so that it need not be as new as the server."""
    reply = client.completions.create(model="fake", prompt=IDS, filter=method)
    assert isinstance(reply.filter, FilterReport)
    assert reply.filter.method == core.requests[0].filter.method == method


def test_a_selection(client: GemserveClient) -> None:
    kept = client.filter(model="fake", messages=MESSAGES, filter=FILTER)
    check(kept.filter, kept.usage.prompt_tokens)
    assert kept.text.startswith("word word")
    asked = {"messages": [0], "documents": []}
    whole = client.filter(model="fake", messages=MESSAGES, filter={"protect": asked})
    assert whole.filter.reason == "mostly_protected"
    assert whole.filter.messages is not None
    first = whole.filter.messages[0]
    assert (first.index, first.role, first.protected_tokens) == (0, "user", first.tokens)
    plain = client.filter(model="fake", prompt=[*IDS, *IDS])
    always = plain.filter.protected_tokens
    assert always > 0
    assert (plain.filter.kept_tokens, plain.filter.selection) == (64 + always, None)
    assert plain.filter.messages is None
    assert plain.usage.completion_tokens == 0


def test_errors_are_the_sdks(client: GemserveClient, core: FakeCore) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="Hi", filter={"keep": 3})
    assert bad.value.param == "filter.keep"
    with pytest.raises(openai.BadRequestError, match=", ".join(SERVED_METHODS)):
        client.completions.create(model="fake", prompt="Hi", filter="best")
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.filter(model="fake", prompt="Hi", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.filter(model="other", prompt="Hi")
    core.script = (FILTERED, "a", ValueError("boom"))
    with (
        client.completions.create(model="fake", prompt="Hi", stream=True) as stream,
        pytest.raises(openai.APIError, match="boom"),
    ):
        list(stream)


def test_a_server_without_adapters_says_so(client: GemserveClient) -> None:
    assert list(client.adapters.list()) == []
    with pytest.raises(openai.BadRequestError, match="--adapter-dir") as refused:
        client.adapters.load(name="a", path="a")
    assert refused.value.param == "path"
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.adapters.unload("a/../b")
    assert missing.value.request.url.raw_path == b"/v1/adapters/a%2F..%2Fb"
    with pytest.raises(openai.NotFoundError, match="'a' does not exist") as missing:
        client.completions.create(model="fake", prompt="Hi", adapter="a")
    assert (missing.value.param, missing.value.code) == ("adapter", "adapter_not_found")


def test_what_else_the_sdk_can_do(client: GemserveClient) -> None:
    """Raw replies, its streaming helper and copies know the filter too."""
    raw = client.completions.with_raw_response.create(
        model="fake", prompt=IDS, extra_body={"filter": FILTER}
    )
    assert raw.headers["x-gemserve-kept-tokens"] == "32"
    assert isinstance(raw.parse(), gemserve_client.Completion)
    with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT
    copied = client.with_options(timeout=5)
    assert isinstance(copied, GemserveClient)
    assert copied.base_url == client.base_url
    check(copied.completions.create(model="fake", prompt=IDS, filter=FILTER).filter)
    assert [model.id for model in copied.models.list()] == ["fake"]


def test_a_full_queue_is_waited_for(core: FakeCore, tokenizer: Any) -> None:
    gate = threading.Event()
    core.script = (FILTERED, gate, "ok")
    with (
        live_server(serving_over(core, tokenizer, max_queue=1)) as url,
        GemserveClient(base_url=url, max_retries=2, timeout=10) as client,
    ):

        def ask() -> str:
            return client.completions.create(model="fake", prompt="Hi").choices[0].text

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        core.started.wait(5)
        threading.Timer(0.3, gate.set).start()
        assert ask() == "ok"
        for thread in threads:
            thread.join(5)


@pytest.mark.anyio
async def test_the_asynchronous_client(patient: AsyncGemserveClient) -> None:
    chat = await patient.chat.completions.create(model="fake", messages=MESSAGES, filter=FILTER)
    assert chat.choices[0].message.content == TEXT
    assert isinstance(chat.filter, FilterReport)
    async with await patient.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, filter=FILTER
    ) as stream:
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert isinstance(chunks[0].filter, FilterReport)
    text = await patient.completions.create(model="fake", prompt=IDS, filter=FILTER)
    check(text.filter)
    async with await patient.completions.create(
        model="fake", prompt=IDS, stream=True, filter=FILTER
    ) as texts:
        parts = [part async for part in texts]
    check(parts[0].filter)
    check((await patient.filter(model="fake", prompt=IDS, filter=FILTER)).filter)
    assert [adapter async for adapter in await patient.adapters.list()] == []
    with pytest.raises(openai.BadRequestError):
        await patient.adapters.load(name="a", path="a")
    with pytest.raises(openai.NotFoundError):
        await patient.adapters.unload("a")
    assert isinstance(patient.with_options(timeout=5), AsyncGemserveClient)


def test_each_of_several_prompts_has_its_report(client: GemserveClient) -> None:
    prompts = [IDS, IDS[:100]]
    whole = client.completions.create(model="fake", prompt=prompts, filter=FILTER)
    assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
    assert isinstance(whole.filter, list)
    for report, length in zip(whole.filter, (200, 100), strict=True):
        check(report, length)
    with client.completions.create(
        model="fake", prompt=prompts, stream=True, filter=FILTER
    ) as stream:
        reports = {c.choices[0].index: c.filter for c in stream if c.filter is not None}
    check(reports[0], 200)
    check(reports[1], 100)


def test_the_key_of_another_service_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, core: FakeCore, tokenizer: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-theirs")
    assert GemserveClient().api_key == "none"
    keys = tmp_path / "keys"
    keys.write_text("sk-ours")
    with live_server(serving_over(core, tokenizer, api_key_file=str(keys))) as url:
        monkeypatch.setenv("GEMSERVE_URL", url)
        with GemserveClient(max_retries=0) as wrong, pytest.raises(openai.AuthenticationError):
            wrong.filter(model="fake", prompt=IDS)
        monkeypatch.setenv("GEMSERVE_API_KEY", "sk-ours")
        with GemserveClient(max_retries=0) as right:
            assert right.filter(model="fake", prompt=[*IDS, *IDS]).filter.applied


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, "http://127.0.0.1:8000/v1/"),
        ("http://host:1", "http://host:1/v1/"),
        ("http://host:1/", "http://host:1/v1/"),
        ("http://host:1/v1", "http://host:1/v1/"),
        ("https://host/behind/proxy", "https://host/behind/proxy/"),
    ],
)
def test_addresses(given: str | None, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMSERVE_URL", raising=False)
    assert str(GemserveClient(base_url=given).base_url) == asked


def test_types_say_what_the_server_takes_and_sends() -> None:
    assert set(get_args(replies.FilterReason)) == set(get_args(filter_plan.FilterReason))
    assert set(FilterReport.model_fields) == {field.name for field in fields(reports.FilterReport)}
    from gemserve.api.replies.reply_types import Adapter
    from gemserve.api.requests.base_bodies import AnswerFilterBody

    assert {*replies.Adapter.model_fields, "object"} == set(Adapter.__annotations__)
    assert set(Filter.__annotations__) == set(AnswerFilterBody.model_fields)


def test_names_are_complete_and_sorted() -> None:
    assert gemserve_client.__all__ == sorted(gemserve_client.__all__)
    for name in gemserve_client.__all__:
        assert getattr(gemserve_client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Client'"):
        _ = gemserve_client.Client  # type: ignore[attr-defined]


def test_a_stream_tells_its_progress(client: GemserveClient, core: FakeCore) -> None:
    """The SDK's own stream options must survive beside ours."""
    half = ServerProgress(phase="filter", tokens=50, total=100, eta_s=2.0)
    core.script = (half, 0.5, FILTERED, "a")
    options: Any = {"include_usage": True}
    for create, prompt in (
        (client.chat.completions.create, {"messages": MESSAGES}),
        (client.completions.create, {"prompt": IDS}),
    ):
        any_create: Any = create
        chunks = list(
            any_create(model="fake", stream=True, progress=True, stream_options=options, **prompt)
        )
        told = [chunk.progress for chunk in chunks if chunk.progress is not None]
        assert told[-1] == replies.Progress(phase="filter", tokens=50, total=100, eta_ms=2000)
        assert chunks[-1].usage.completion_tokens == 1
        quiet = list(any_create(model="fake", stream=True, **prompt))
        assert not [chunk for chunk in quiet if chunk.progress is not None]


def test_the_client_needs_none_of_the_servers_libraries() -> None:
    unwanted = "{'torch', 'transformers', 'gemserve', 'fastapi', 'numpy'}"
    code = f"from gemserve_client import *; import sys; assert not {unwanted} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_documents_are_reranked_and_scored(client: GemserveClient) -> None:
    query, documents = "red boat", ["a blue house", "the red boat", "a boat"]
    reranked = client.rerank(query=query, documents=documents, top_n=2, return_documents=True)
    assert isinstance(reranked, replies.Reranked)
    first, second = reranked.results
    assert first.index == 1
    assert first.document is not None
    assert first.document.text == documents[1]
    assert 1 >= first.relevance_score >= second.relevance_score >= 0
    scored = client.score(text_1=query, text_2=documents)
    assert [pair.index for pair in scored.data] == [0, 1, 2]
    assert max(scored.data, key=lambda pair: pair.score).index == 1
    assert scored.usage.prompt_tokens > 0


@pytest.mark.anyio
async def test_they_are_so_without_waiting_too(patient: AsyncGemserveClient) -> None:
    reranked = await patient.rerank(query="red", documents=["blue", "red"], model="fake")
    assert reranked.results[0].index == 1
    scored = await patient.score(text_1=["red"], text_2=["red"])
    assert len(scored.data) == 1


def test_a_wrong_ranking_names_its_field(client: GemserveClient) -> None:
    with pytest.raises(openai.BadRequestError, match="documents"):
        client.rerank(query="red", documents=[])
