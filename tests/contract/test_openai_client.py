"""The real `openai` client against a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes import FILTERED, FakeCore, live_server, serving_over, wait_for

TEXT = "Héllo 🌍!"
MESSAGES: Any = [{"role": "user", "content": "Où? 🌍"}]
FILTER = {"filter": {"method": "gemfilter", "keep": 32, "return_selection": True}}


@pytest.fixture
def url(core: FakeCore, tokenizer: Any) -> Iterator[str]:
    with live_server(serving_over(core, tokenizer, max_queue=1)) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as opened:
        yield opened


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "gemserve"


def test_whole_replies(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 4
    text = client.completions.create(model="fake", prompt="Où? 🌍")
    assert text.choices[0].text == TEXT


def test_streams(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    said, usages = "", []
    with client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options=options
    ) as chunks:
        for chunk in chunks:
            said += "".join(c.delta.content or "" for c in chunk.choices)
            usages.append(chunk.usage)
    assert said == TEXT
    assert usages[-1] is not None
    assert set(usages[:-1]) == {None}
    with client.completions.create(model="fake", prompt="Hi", stream=True) as texts:
        assert "".join(t.choices[0].text for t in texts) == TEXT


def test_the_filter_travels_in_extra_body(client: openai.OpenAI, core: FakeCore) -> None:
    ids = list(range(10, 210))
    whole = client.completions.create(model="fake", prompt=ids, extra_body=FILTER)
    assert whole.model_extra is not None
    report = whole.model_extra["filter"]
    assert (report["method"], report["applied"], report["kept_tokens"]) == ("gemfilter", True, 32)
    assert report["selection"] == [[0, 32]]
    with client.completions.create(
        model="fake", prompt=ids, stream=True, extra_body=FILTER
    ) as chunks:
        first = next(iter(chunks))
    assert first.model_extra is not None
    assert first.model_extra["filter"] == report
    assert core.requests[0].filter == core.requests[1].filter


def test_headers_carry_the_counts(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fake", prompt=list(range(10, 210)), extra_body=FILTER
    )
    assert raw.headers["x-gemserve-prompt-tokens"] == "200"
    assert raw.headers["x-gemserve-kept-tokens"] == "32"
    assert raw.headers["x-request-id"]


def test_errors_have_their_classes(client: openai.OpenAI, core: FakeCore) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="Hi", extra_body={"filter": {"keep": 3}})
    assert (bad.value.param, bad.value.type) == ("filter.keep", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "word " * 2000}], stream=True
        )
    assert long.value.code == "context_length_exceeded"
    core.script = (FILTERED, "a", ValueError("boom"))
    with pytest.raises(openai.InternalServerError, match="boom"):
        client.completions.create(model="fake", prompt="Hi")


def test_a_failure_in_a_stream_is_raised_where_it_happens(
    client: openai.OpenAI, core: FakeCore
) -> None:
    core.script = (FILTERED, "a", "b", ValueError("boom"))
    with client.chat.completions.create(model="fake", messages=MESSAGES, stream=True) as chunks:
        iterator = iter(chunks)
        said = [next(iterator).choices[0].delta.content for _ in range(3)]
        with pytest.raises(openai.APIError, match="boom"):
            next(iterator)
    assert said == ["", "a", "b"]


def test_a_full_queue_is_retried_by_the_client(url: str, core: FakeCore) -> None:
    """503 with Retry-After: the client waits, then succeeds."""
    gate = threading.Event()
    core.script = (FILTERED, gate, "ok")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:

        def ask() -> None:
            client.completions.create(model="fake", prompt="Hi")

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        wait_for(core.started.is_set)
        threads[1].start()
        wait_for(lambda: "requests_waiting 1.0" in _metrics(url))
        with pytest.raises(openai.InternalServerError) as full:
            ask()
        assert (full.value.status_code, full.value.code) == (503, "queue_full")
        threading.Timer(0.1, gate.set).start()
        patient = client.with_options(max_retries=2)
        reply = patient.completions.create(model="fake", prompt="Hi")
        assert reply.choices[0].text == "ok"
        for thread in threads:
            thread.join(5)


def _metrics(url: str) -> str:
    import httpx

    return httpx.get(url.removesuffix("/v1") + "/metrics").text


@pytest.mark.anyio
async def test_the_asynchronous_client(url: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=10
    ) as client:
        chat = await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert chat.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, extra_body=FILTER
        )
        async with stream:
            said = [c.choices[0].delta.content or "" async for c in stream]
        assert "".join(said) == TEXT
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="Hi")
