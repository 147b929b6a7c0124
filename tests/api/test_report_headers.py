"""The filter report as headers, for clients that drop what they do not know of a reply's body."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    live_server,
    serving_over,
)

pytestmark = pytest.mark.anyio
PROMPT, KEPT, REPORT = (f"x-gemserve-{name}" for name in ("prompt-tokens", "kept-tokens", "filter"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3])
async def test_haystack_finds_the_report_in_a_stream_s_headers(api: Api, path: str, n: int) -> None:
    """Streams had none, and haystack, openai-agents and pydantic-ai drop the chunk's `filter`."""
    fields = {"n": n, "filter": {"return_selection": True}}
    whole = await api.post(path, **fields)
    streamed = await api.post(path, stream=True, **fields)
    report = next(c["filter"] for c in data_of(streamed) if "filter" in c)
    for reply in (whole, streamed):
        assert reply.headers[PROMPT] == str(report["prompt_tokens"])
        assert reply.headers[KEPT] == str(report["kept_tokens"])
        # what may be long is left out
        assert (report["messages"] is None) == (path == COMPLETIONS)
        short = {**report, "selection": None, "messages": None}
        assert json.loads(reply.headers[REPORT]) == short
    assert streamed.headers["cache-control"] == "no-cache"


async def test_several_prompts_have_no_single_report(api: Api) -> None:
    reply = await api.post(COMPLETIONS, prompt=["a", "b c"])
    assert PROMPT in reply.headers
    assert REPORT not in reply.headers
    streamed = await api.post(COMPLETIONS, prompt=["a", "b c"], stream=True)
    assert PROMPT not in streamed.headers  # the second prompt is read later
    data_of(streamed)


def test_a_long_filter_pass_holds_no_stream_back(tokenizer: Any) -> None:
    """The headers wait for the first event, and an empty chunk is one."""
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "a")
    with live_server(serving_over(core, tokenizer, keep_alive_s=0.05)) as url:
        body = {"model": "fake", "prompt": "x", "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=10) as reply:
            lines = reply.iter_lines()
            chunk = json.loads(next(lines).removeprefix("data: "))
            assert chunk["choices"][0]["text"] == ""
            assert "filter" not in chunk
            assert PROMPT not in reply.headers
            gate.set()
            assert '"filter"' in "".join(lines)


def test_leaving_before_the_first_event_ends_the_request(tokenizer: Any) -> None:
    core = FakeCore(threading.Event())
    with live_server(serving_over(core, tokenizer)) as url:
        body = {"model": "fake", "prompt": "x", "stream": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + COMPLETIONS, json=body, timeout=httpx.Timeout(5, read=0.3))
        assert core.started.is_set()
        assert core.cancelled.wait(5)


async def test_a_full_queue_says_when_to_come_back(tokenizer: Any) -> None:
    """It always said one second."""
    gate = threading.Event()
    core = FakeCore(FILTERED, 0.2, "a", gate, "b")
    async with api_over(core, tokenizer, max_queue=1) as api:
        first = asyncio.create_task(api.post(COMPLETIONS, max_tokens=900))
        await asyncio.sleep(0.6)
        second = asyncio.create_task(api.post(COMPLETIONS, max_tokens=900))
        await asyncio.sleep(0.3)
        refused = await api.post(COMPLETIONS)
        gate.set()
        await asyncio.gather(first, second)
    assert refused.status_code == 503
    assert 10 < int(refused.headers["retry-after"]) <= 60


async def test_what_would_wait_too_long_is_refused(tokenizer: Any) -> None:
    """Of twice what a server can do, it answered everything, and everything too late."""
    gate = threading.Event()
    core = FakeCore(FILTERED, 0.2, "a", gate, "b")
    async with api_over(core, tokenizer, max_queue=100, max_wait_s=5.0) as api:
        first = asyncio.create_task(api.post(COMPLETIONS, max_tokens=900))
        await asyncio.sleep(0.6)
        refused = await api.post(COMPLETIONS, max_tokens=900)
        gate.set()
        await first
        later = await api.post(COMPLETIONS, max_tokens=900)
        metrics = await api.metrics()
    assert (refused.status_code, later.status_code) == (503, 200)
    assert "none wait for more than 5 s" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 5
    assert metrics['admission_rejections_total{reason="queue_full"}'] == 1
