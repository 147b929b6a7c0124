"""Limits: prompt length, body size, queue, request ids; all checked before the work."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.request_builder import DEFAULT_CHAT_TOKENS
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    FILTERED,
    MODEL,
    Api,
    CountingTokenizer,
    FakeCore,
    api_over,
    serving_over,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
LONGEST_TOKEN = 16  # characters, of the built-in tokenizer
LIMIT = 1000


def with_text(path: str, text: str) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


@both
async def test_a_prompt_too_long_in_characters_is_not_tokenized(tokenizer: Any, path: str) -> None:
    counting = CountingTokenizer(tokenizer)
    async with api_over(FakeCore(), counting, max_prompt_tokens=LIMIT) as api:
        text = "x" * (LIMIT + 1) * LONGEST_TOKEN
        reply = await api.post(path, **with_text(path, text))
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"].split(".")[0] == ("prompt" if path == COMPLETIONS else "messages")
        assert f"maximum context length is {LIMIT} tokens" in error["message"]
        assert f"contains at least {LIMIT + 1} input tokens" in error["message"]
        assert counting.num_calls == 0
        await api.assert_alive()


async def test_many_messages_too_long_together_are_not_tokenized(tokenizer: Any) -> None:
    counting = CountingTokenizer(tokenizer)
    async with api_over(FakeCore(), counting, max_prompt_tokens=LIMIT) as api:
        text = "x" * (LIMIT // 2) * LONGEST_TOKEN
        messages = [{"role": "user", "content": text}] * 50
        reply = await api.post(CHAT, messages=messages)
        assert reply.status_code == 400
        assert counting.num_calls == 0


@both
async def test_a_prompt_too_long_in_tokens(api: Api, path: str) -> None:
    reply = await api.post(path, **with_text(path, "word " * 1100))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (
        "maximum context length is 1000 tokens. However, your prompt contains" in error["message"]
    )
    assert api.core.requests == []
    await api.assert_alive()


async def test_the_longest_prompt_fits_and_one_more_does_not(api: Api) -> None:
    assert (await api.post(COMPLETIONS, prompt=[9] * LIMIT)).status_code == 200
    reply = await api.post(COMPLETIONS, prompt=[9] * (LIMIT + 1))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert "contains 1001 input tokens" in reply.json()["error"]["message"]


async def test_the_longest_tokens_do_not_make_a_prompt_too_long(api: Api) -> None:
    """The check in characters must not refuse what the tokens would allow."""
    text = "=" * LONGEST_TOKEN * (LIMIT - 10)
    assert (await api.post(COMPLETIONS, prompt=text)).status_code == 200
    assert len(api.core.requests[0].prompt_ids) < LIMIT


async def test_max_tokens_counts_from_what_is_kept(api: Api) -> None:
    """The context limits what the answer is generated after, which filtering shortens."""
    prompt = [9] * LIMIT
    kept: dict[str, Any] = {"prompt": prompt, "filter": {"keep": 100}}
    report = (await api.post(COMPLETIONS, **kept, max_tokens=1)).json()["filter"]
    always = report["protected_tokens"]  # the end of the prompt, where its question may be
    assert 0 < always < 100
    assert report["kept_tokens"] == always + 100
    assert (await api.post(COMPLETIONS, **kept, max_tokens=1900 - always)).status_code == 200
    reply = await api.post(COMPLETIONS, **kept, max_tokens=1901 - always)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
    whole: dict[str, Any] = {"prompt": prompt, "filter": "none"}
    assert (await api.post(COMPLETIONS, **whole, max_tokens=1000)).status_code == 200
    assert (await api.post(COMPLETIONS, **whole, max_tokens=1001)).status_code == 400


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_answers_at_once_and_tokenizes_nothing(
    tokenizer: Any, path: str, stream: bool
) -> None:
    gate = threading.Event()
    counting = CountingTokenizer(tokenizer)
    async with api_over(FakeCore(FILTERED, gate), counting, max_queue=1) as api:
        waiting = [asyncio.create_task(api.post(path, stream=stream))]
        await wait_for_async(api.core.started.is_set)
        waiting.append(asyncio.create_task(api.post(path, stream=stream)))
        await wait_for_async(lambda: api.serving.engine.num_waiting == 1)
        before, started_s = counting.num_calls, time.monotonic()
        reply = await api.post(path, stream=stream)
        assert time.monotonic() - started_s < 0.3
        assert (reply.status_code, counting.num_calls) == (503, before)
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["x-request-id"]
        assert reply.json()["error"]["code"] == "queue_full"
        metrics = await api.metrics()
        assert metrics['admission_rejections_total{reason="queue_full"}'] == 1
        assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (1, 1)
        gate.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]
        await api.assert_alive()


async def test_a_burst_never_exceeds_the_queue(tokenizer: Any) -> None:
    """All pass the early check before any is queued; the late check must hold."""
    gate = threading.Event()
    async with api_over(FakeCore(gate, FILTERED, "ok"), tokenizer, max_queue=3) as api:
        posts = [asyncio.create_task(api.post(CHAT)) for _ in range(24)]
        await wait_for_async(lambda: sum(p.done() for p in posts) >= 20)
        assert api.serving.engine.num_waiting <= 3
        gate.set()
        statuses = [r.status_code for r in await asyncio.gather(*posts)]
    assert set(statuses) == {200, 503}
    assert 3 <= statuses.count(200) <= 4


@both
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_too_large_is_a_413(tokenizer: Any, path: str, is_announced: bool) -> None:
    async with api_over(FakeCore(), tokenizer, max_body_bytes=10_000) as api:
        raw = json.dumps({"model": "fake", "prompt": "x" * 20_000}).encode()
        num_sent = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal num_sent
            for start in range(0, len(raw), 1000):
                num_sent += 1
                yield raw[start : start + 1000]

        reply = await api.client.post(path, content=raw if is_announced else pieces())
        assert reply.status_code == 413
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "10000" in error["message"]
        assert reply.headers["x-request-id"]
        assert num_sent <= 11
        await api.assert_alive()


async def test_a_body_at_the_limit_is_read(tokenizer: Any) -> None:
    raw = json.dumps({"model": "fake", "prompt": "Hi"}).encode()
    async with api_over(FakeCore(), tokenizer, max_body_bytes=len(raw)) as api:
        assert (await api.client.post(COMPLETIONS, content=raw)).status_code == 200
        assert (await api.client.post(COMPLETIONS, content=raw + b" ")).status_code == 413


@pytest.mark.parametrize("given", ["a", "req-1.2:3/4", "x" * 128])
async def test_a_sane_request_id_is_echoed(api: Api, given: str) -> None:
    headers = {"X-Request-Id": given}
    for stream in (False, True):
        reply = await api.post(CHAT, headers=headers, stream=stream)
        assert reply.headers.get_list("x-request-id") == [given]
    rejected = await api.post(CHAT, headers=headers, temperature=9)
    assert rejected.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "x" * 1_000_000, "é", "a\tb"])
async def test_any_other_request_id_is_replaced(api: Api, given: str) -> None:
    reply = await api.client.get("/health", headers={b"X-Request-Id": given.encode()})
    assert reply.headers["x-request-id"] != given
    assert 0 < len(reply.headers["x-request-id"]) <= 128
    again = await api.client.get("/health", headers={b"X-Request-Id": given.encode()})
    assert again.headers["x-request-id"] != reply.headers["x-request-id"]


@both
async def test_a_limit_may_be_lowered_to_what_the_context_leaves(api: Api, path: str) -> None:
    fields = {"filter": "none", "max_tokens": 10 * CONTEXT}
    refused = await api.post(path, **fields)
    assert refused.status_code == 400
    assert "room" in refused.json()["error"]["message"]
    for stream in (False, True):
        reply = await api.post(path, **fields, truncate_max_tokens=True, stream=stream)
        assert reply.status_code == 200, reply.text
        request = api.core.requests[-1]
        room = CONTEXT - len(request.prompt_ids)
        assert request.sampling.max_tokens == room
        assert reply.headers["x-gemserve-max-tokens"] == str(room)
    reply = await api.post(path, max_tokens=7, truncate_max_tokens=True)
    assert reply.headers["x-gemserve-max-tokens"] == "7"


async def test_a_short_prompt_s_default_answer_stays_in_the_original_context(
    tokenizer: Any,
) -> None:
    """Phi-3-128K would read every chat with the factors of long sequences: 4,096 was counted."""
    serving = serving_over(FakeCore(), tokenizer, context_tokens=20000, max_prompt_tokens=10000)
    builder = replace(serving.builder, unscaled_tokens=1000)

    def answer(num_words: int, **fields: Any) -> int:
        content = "river " * num_words
        messages = [{"role": "user", "content": content}]
        body = ChatBody.model_validate(
            {"model": MODEL, "messages": messages, "filter": {"method": "none"}, **fields}
        )
        request = builder.build_chat(body, "r").requests[0]
        lengths.append(len(request.prompt_ids))
        return request.sampling.max_tokens

    lengths: list[int] = []
    assert answer(10) == 1000 - lengths[-1]
    assert answer(10, max_tokens=3000) == 3000  # the client wants a long one
    assert answer(900) == DEFAULT_CHAT_TOKENS  # fewer than 512 are left
    assert answer(1500) == DEFAULT_CHAT_TOKENS
