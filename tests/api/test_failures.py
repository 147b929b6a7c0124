"""Requests that fail while they run: said once, in the right place, and nobody else suffers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gemserve.decoding.sampling import InvalidLogits
from tests.fakes import (
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
BOOM = MemoryError("boom")


@both
@pytest.mark.parametrize("script", [(BOOM,), (FILTERED, BOOM), (FILTERED, "a", BOOM)])
async def test_a_failure_is_a_500_when_the_reply_is_whole(
    api: Api, core: FakeCore, path: str, script: tuple[Any, ...]
) -> None:
    core.script = script
    reply = await api.post(path)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert reply.headers["x-request-id"]
    core.script = (FILTERED, "fine")
    await api.assert_alive()


@both
@pytest.mark.parametrize(
    ("script", "said"),
    [((1.2, BOOM), ""), ((FILTERED, BOOM), ""), ((FILTERED, "a", "b", BOOM), "ab")],
)
async def test_a_failure_in_a_stream_is_one_error_chunk_and_one_done(
    api: Api, core: FakeCore, path: str, script: tuple[Any, ...], said: str
) -> None:
    core.script = script
    usage = {"include_usage": True}
    reply = await api.post(path, stream=True, stream_options=usage)
    *good, bad = data_of(reply, has_idle=script[0] == 1.2)
    assert set(bad) == {"error"}
    assert "boom" in bad["error"]["message"]
    assert text_of(good) == said
    assert all(choice["finish_reason"] is None for c in good for choice in c["choices"])
    core.script = (FILTERED, "fine")
    await api.assert_alive()


@both
async def test_a_stream_that_fails_before_its_head_is_sent_has_the_status(
    api: Api, core: FakeCore, path: str
) -> None:
    core.script = (BOOM,)
    reply = await api.post(path, stream=True)
    assert reply.status_code == 500
    assert "boom" in reply.json()["error"]["message"]


async def test_nan_logits_fail_one_request(api: Api, core: FakeCore) -> None:
    core.script = (FILTERED, InvalidLogits("the model's logits are not finite"))
    reply = await api.post(CHAT)
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]
    core.script = (FILTERED, "fine")
    await api.assert_alive()


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_ends_the_request_and_says_so_ever_after(
    tokenizer: Any, path: str, stream: bool
) -> None:
    async with api_over(FakeCore(FILTERED, "a", SystemExit("device lost")), tokenizer) as api:
        assert (await api.client.get("/health")).status_code == 200
        async with asyncio.timeout(5):
            reply = await api.post(path, stream=stream)
        if stream:
            assert "device lost" in data_of(reply)[-1]["error"]["message"]
        else:
            assert reply.status_code == 500
        for probe in ("/health", "/ready"):
            answer = await api.client.get(probe)
            assert answer.status_code == 503
            assert "device lost" in answer.text
        async with asyncio.timeout(5):
            again = await api.post(path, stream=stream)
        assert again.status_code == 503
        assert again.json()["error"]["code"] == "engine_dead"
        assert (await api.client.get("/metrics")).status_code == 200


@both
async def test_a_stopping_server_ends_running_requests(tokenizer: Any, path: str) -> None:
    async with api_over(FakeCore(FILTERED, "a", 30.0), tokenizer) as api:
        posts = [asyncio.create_task(api.post(path, stream=s)) for s in (True, False)]
        engine = api.serving.engine
        await wait_for_async(lambda: engine.num_running + engine.num_waiting == 2)
        await asyncio.to_thread(engine.stop)
        async with asyncio.timeout(5):
            streamed, whole = await asyncio.gather(*posts)
        if streamed.status_code == 200:  # its head was sent before
            assert "error" in data_of(streamed)[-1]
        else:
            assert streamed.status_code == 503
        assert whole.status_code == 503


class BrokenTokenizer:
    """Fails as no one expected."""

    def __init__(self, tokenizer: Any) -> None:
        self.get_vocab = tokenizer.get_vocab
        self.bos_token_id = tokenizer.bos_token_id
        self.chat_template = tokenizer.chat_template

    @property
    def backend_tokenizer(self) -> Any:
        raise RuntimeError("a bug")

    get_chat_template = backend_tokenizer


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_bug_is_a_json_500_with_a_request_id(tokenizer: Any, path: str) -> None:
    async with api_over(FakeCore(), BrokenTokenizer(tokenizer)) as api:
        reply = await api.post(path, headers={"X-Request-Id": "mine"})
        assert reply.status_code in (400, 500)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert reply.headers["x-request-id"] == "mine"
