"""What a good request gets back, on both endpoints, streamed or whole."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    text_of,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
TEXT = "Héllo 🌍!"
OBJECTS = {
    (COMPLETIONS, False): "text_completion",
    (COMPLETIONS, True): "text_completion",
    (CHAT, False): "chat.completion",
    (CHAT, True): "chat.completion.chunk",
}


@both
async def test_a_whole_reply_is_openai_s(api: Api, path: str) -> None:
    reply = await api.post(path)
    body = reply.json()
    assert reply.status_code == 200
    assert body["object"] == OBJECTS[path, False]
    assert body["model"] == "fake"
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert text_of([body]) == TEXT
    num_prompt = len(api.core.requests[0].prompt_ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "kept_tokens": num_prompt,
            "protected_tokens": body["filter"]["protected_tokens"],
        },
    }
    assert 0 < body["filter"]["protected_tokens"] <= num_prompt


@both
async def test_a_stream_is_openai_s(api: Api, path: str) -> None:
    chunks = data_of(await api.post(path, stream=True))
    assert {c["object"] for c in chunks} == {OBJECTS[path, True]}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    reasons = [choice["finish_reason"] for c in chunks for choice in c["choices"]]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])


@both
async def test_streamed_text_equals_whole_text(api: Api, path: str) -> None:
    streamed = data_of(await api.post(path, stream=True))
    assert text_of(streamed) == text_of([(await api.post(path)).json()]) == TEXT


@both
async def test_non_ascii_crosses_the_wire_as_utf_8(api: Api, path: str) -> None:
    said = "Où est 漢字 🇨🇭\u2028?"
    prompt: Any = said if path == COMPLETIONS else [{"role": "user", "content": said}]
    field = "prompt" if path == COMPLETIONS else "messages"
    for stream in (False, True):
        reply = await api.post(path, stream=stream, **{field: prompt})
        assert "🌍".encode() in reply.content
        assert "é".encode() in reply.content
        ids = api.core.requests[-1].prompt_ids
        assert said in api.serving.builder.tokenizer.decode(ids)


async def test_a_line_break_in_the_text_does_not_break_the_stream(api: Api, core: FakeCore) -> None:
    core.script = (FILTERED, "a\n\ndata: [DONE]\n\n", "\r\u2028\u0085", "b")
    chunks = data_of(await api.post(CHAT, stream=True))
    assert text_of(chunks) == "a\n\ndata: [DONE]\n\n\r\u2028\u0085b"


@both
async def test_the_filter_report_comes_first_in_a_stream_and_once(api: Api, path: str) -> None:
    whole = (await api.post(path)).json()["filter"]
    chunks = data_of(await api.post(path, stream=True))
    assert chunks[0]["filter"] == whole
    assert all("filter" not in c for c in chunks[1:])
    assert set(whole) == {
        *("method", "applied", "reason", "layer", "prompt_tokens", "kept_tokens"),
        *("cached_tokens", "filter_ms", "selection", "scores"),
        *("coverage", "coverage_bound"),
        *("protected_tokens", "added_tokens", "messages", "first_difference"),
        *("window", "windows", "cached_windows", "reader"),
        *("searched", "sources", "found"),
    }
    assert (whole["messages"] is None) == (path == COMPLETIONS)
    assert (whole["applied"], whole["reason"]) == (False, "short_prompt")


async def test_usage_counts_what_was_sent_not_what_was_kept(api: Api) -> None:
    reply = await api.post(COMPLETIONS, prompt=list(range(10, 510)), filter={"keep": 32})
    body = reply.json()
    assert body["usage"]["prompt_tokens"] == body["filter"]["prompt_tokens"] == 500
    always = body["filter"]["protected_tokens"]
    assert always > 0
    assert body["filter"]["kept_tokens"] == 32 + always
    assert reply.headers["x-gemserve-prompt-tokens"] == "500"
    assert reply.headers["x-gemserve-kept-tokens"] == str(32 + always)
    assert body["filter"]["selection"] is None


async def test_a_selection_comes_only_if_asked_for(api: Api) -> None:
    options = {"keep": 32, "return_selection": True}
    reply = await api.post(COMPLETIONS, prompt=list(range(10, 510)), filter=options)
    report = reply.json()["filter"]
    assert report["selection"] == [[0, 32], [500 - report["protected_tokens"], 500]]


@both
async def test_usage_is_streamed_only_if_asked_for(api: Api, path: str) -> None:
    silent = data_of(await api.post(path, stream=True))
    assert all("usage" not in c for c in silent)
    assert all(c["choices"] for c in silent)
    declined = await api.post(path, stream=True, stream_options={"include_usage": False})
    assert all("usage" not in c for c in data_of(declined))
    asked = data_of(await api.post(path, stream=True, stream_options={"include_usage": True}))
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == (await api.post(path)).json()["usage"]
    assert all(c["usage"] is None and c["choices"] for c in asked[:-1])


@both
async def test_ids_are_unique(api: Api, path: str) -> None:
    replies = await asyncio.gather(*(api.post(path) for _ in range(4)))
    assert len({r.json()["id"] for r in replies}) == 4


async def test_equal_client_ids_are_two_requests(tokenizer: Any) -> None:
    gate = threading.Event()
    async with api_over(FakeCore(gate, FILTERED, "ok"), tokenizer) as api:
        headers = {"X-Request-Id": "same"}
        posts = [asyncio.create_task(api.post(CHAT, headers=headers)) for _ in range(3)]
        await wait_for_async(lambda: api.serving.engine.num_waiting == 2)
        gate.set()
        replies = await asyncio.gather(*posts)
    assert [r.status_code for r in replies] == [200] * 3
    assert [r.headers["x-request-id"] for r in replies] == ["same"] * 3
    assert len({r.json()["id"] for r in replies}) == 3


async def test_empty_chunks_while_nothing_is_said(tokenizer: Any) -> None:
    """Proxies and clients give up a stream that is silent while a long prompt is read.

    Comments do not reset the timers of some clients.
    """
    core = FakeCore(0.2, FILTERED, 0.2, "a", "b")
    async with api_over(core, tokenizer, keep_alive_s=0.03) as api:
        reply = await api.post(CHAT, stream=True)
        chunks = data_of(reply, has_idle=True)
        idle = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        assert [chunk["choices"][0] for chunk in chunks].count(idle) >= 4
        assert chunks[0]["choices"] == [idle]
        assert text_of(chunks) == "ab"
        core.script = (FILTERED, "a", "b")
        chunks = data_of(await api.post(CHAT, stream=True), has_idle=True)
        assert idle not in [chunk["choices"][0] for chunk in chunks]


async def test_an_ended_choice_says_nothing_in_pauses(tokenizer: Any) -> None:
    core = FakeCore(0.2, FILTERED, "a")  # one after the other
    async with api_over(core, tokenizer, keep_alive_s=0.05) as api:
        chunks = data_of(await api.post(CHAT, stream=True, n=2), has_idle=True)
    ended = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == {0, 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_head_comes_within_a_second(path: str, tokenizer: Any) -> None:
    """A client that waits for it cannot tell a server that reads from one that is gone."""
    core = FakeCore(1.4, FILTERED, "a")
    async with api_over(core, tokenizer) as api:
        chunks = data_of(await api.post(path, stream=True), has_idle=True)
    assert "filter" not in chunks[0]
    assert "filter" in chunks[1]
    assert text_of(chunks) == "a"


@both
async def test_fields_without_effect_are_accepted(api: Api, path: str) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "n": 1,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    assert (await api.post(path, **fields, seed=-1, top_k=5, stop=["a"])).status_code == 200
    nulls = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "user", "filter"))
    assert (await api.post(path, **nulls)).status_code == 200


async def test_sampling_reaches_the_engine(api: Api) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "ignore_eos": True,
    }
    for path in BODIES:
        await api.post(path, **fields, stop="END", max_tokens=5)
        sampling = api.core.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.seed, sampling.ignore_eos) == (3, True)
        assert (sampling.stop, sampling.max_tokens) == (("END",), 5)


async def test_defaults_of_max_tokens(api: Api) -> None:
    """16 for completions, as OpenAI's; what the context leaves for chat."""
    await api.post(COMPLETIONS)
    assert api.core.requests[-1].sampling.max_tokens == 16
    await api.post(CHAT)
    request = api.core.requests[-1]
    assert request.sampling.max_tokens == 2000 - len(request.prompt_ids)
    await api.post(CHAT, max_tokens=3, max_completion_tokens=4)
    assert api.core.requests[-1].sampling.max_tokens == 4


async def test_content_parts_are_lines(api: Api) -> None:
    """As in vLLM. Joined without a break, a document's last word ran into the question."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    await api.post(CHAT, messages=[{"role": "user", "content": parts}])
    await api.post(CHAT, messages=[{"role": "user", "content": "Hello\nthere"}])
    first, second = api.core.requests
    assert first.prompt_ids == second.prompt_ids


async def test_one_prompt_in_a_list_is_a_prompt(api: Api) -> None:
    await api.post(COMPLETIONS, prompt=["Hello there"])
    await api.post(COMPLETIONS)
    first, second = api.core.requests
    assert first.prompt_ids == second.prompt_ids
