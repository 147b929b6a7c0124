"""Requests whose first token would come too late are not begun, and the client is told so."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from gemserve.api.access.backlog import Backlog
from gemserve.api.app import create_app
from gemserve.api.routes.submission import Submitter
from gemserve.contract.events import Event, Finished
from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    FakeJob,
    api_over,
    data_of,
    serving_over,
)

pytestmark = pytest.mark.anyio
LATE = Finished(
    reason="error", completion_tokens=0, error="too late", is_unread=True, late="not_begun"
)
ENDS = ("stop", "length", "abort", "error")
TIMEOUT = "X-Request-Timeout"


async def begin_within(
    api: Api, core: FakeCore, headers: Mapping[str, str], **fields: Any
) -> float:
    """Seconds in which the engine must have begun."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], **fields}
    reply = await api.client.post(CHAT, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return core.requests[-1].begin_within_s


async def test_it_is_a_503_with_retry_after(api: Api, core: FakeCore) -> None:
    core.script = (LATE,)
    reply = await api.post(CHAT)
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert reply.json()["error"]["code"] == "queue_full"
    assert int(reply.headers["retry-after"]) >= 1
    metrics = await api.metrics()
    assert metrics['admission_rejections_total{reason="queue_full"}'] == 1
    assert not any(metrics.get(f'request_success_total{{finish_reason="{each}"}}') for each in ENDS)


async def test_a_fault_is_not_told_as_load(api: Api, core: FakeCore) -> None:
    """Whatever failed before anything was read was a 503 of a full queue."""
    core.script = (replace(LATE, error="boom", late=None),)
    reply = await api.post(CHAT)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    assert "boom" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_never_began_has_the_status(
    api: Api, core: FakeCore, path: str
) -> None:
    """Libraries ask again after a 503, and not after an error in a stream."""
    core.script = (LATE,)
    reply = await api.post(path, stream=True)
    assert reply.status_code == 503, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_head_waits_for_the_beginning_if_that_is_soon(tokenizer: Any) -> None:
    core = FakeCore(1.4, LATE)
    async with api_over(core, tokenizer, max_wait_s=1.2) as api:
        reply = await api.post(CHAT, stream=True)
        assert reply.status_code == 503
        core.script = (1.8, FILTERED, "fine")
        idle, *_ = data_of(await api.post(CHAT, stream=True), has_idle=True)
        assert not idle["choices"][0]["delta"].get("content")


async def test_a_stream_whose_head_is_sent_gets_one_error(api: Api, core: FakeCore) -> None:
    core.script = (1.2, LATE)
    (*idle, error) = data_of(await api.post(CHAT, stream=True), has_idle=True)
    assert error["error"]["code"] == "queue_full"
    assert len(idle) == 1


async def test_the_shortest_limit_counts(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "fine")
    async with api_over(core, tokenizer, max_wait_s=40.0, request_timeout_s=50.0) as api:
        given = [
            await begin_within(api, core, headers, **fields)
            for headers, fields in (
                ({}, {}),
                ({TIMEOUT: "30"}, {}),
                ({TIMEOUT: "300"}, {}),
                ({"X-Stainless-Read-Timeout": "20.5"}, {}),
                ({"X-Stainless-Timeout": "20", "X-Stainless-Read-Timeout": "None"}, {}),
                ({"X-Stainless-Read-Timeout": "20"}, {"stream": True}),  # it sees signs of life
                ({"X-Stainless-Read-Timeout": "20", TIMEOUT: "30"}, {}),
            )
        ]
        assert given == pytest.approx([40, 30, 40, 20.5, 20, 40, 30], abs=1)
        await begin_within(api, core, {}, n=2)
        first, second = (request.begin_within_s for request in core.requests[-2:])
        assert first == pytest.approx(40, abs=1)
        assert second == math.inf


@pytest.mark.parametrize("said", ["", "0", "-1", "nan", "inf", "soon", "86401"])
async def test_a_timeout_that_is_none_names_its_header(api: Api, said: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    reply = await api.client.post(CHAT, json=body, headers={TIMEOUT: said})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == TIMEOUT
    assert error["message"].startswith(f"{TIMEOUT}={said!r}: must be a number of seconds")


async def test_an_answer_that_takes_longer_than_its_client_waits_ends(
    api: Api, core: FakeCore
) -> None:
    core.script = (FILTERED, "a", 20.0)
    began_s = time.monotonic()
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    reply = await api.client.post(CHAT, json=body, headers={TIMEOUT: "0.3"})
    assert reply.status_code == 504
    assert "it took longer than 0.3 s (X-Request-Timeout)" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "request_timeout"
    assert reply.headers["x-should-retry"] == "false"
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("n", [1, 2])
async def test_what_has_not_begun_when_its_time_is_over_is_refused(
    api: Api, core: FakeCore, n: int
) -> None:
    """It was a 500 or a 503, as the clocks of engine and reply would have it; a 504 of two."""
    gate = threading.Event()
    core.script = (FILTERED, gate, "a")
    first = asyncio.create_task(api.post(CHAT))
    while not core.started.is_set():
        await asyncio.sleep(0.01)
    reply = await api.post(CHAT, headers={TIMEOUT: "0.3"}, n=n)
    gate.set()
    assert (await first).status_code == 200
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    assert "its reading had not begun after 0.3 s (X-Request-Timeout)" in reply.text
    assert int(reply.headers["retry-after"]) >= 1
    assert (await api.metrics())['admission_rejections_total{reason="queue_full"}'] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_step_that_hangs_does_not_make_a_client_wait_beyond_its_time(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Its time was over, and it was told so when the step ended, if it ever did."""
    monkeypatch.setattr("gemserve.api.replies.event_reader.GRACE_S", 0.2)
    gate = threading.Event()

    class HangingCore(FakeCore):
        def step(self) -> list[tuple[FakeJob, Event]]:
            gate.wait(30)
            return super().step()

    async with api_over(HangingCore(), tokenizer) as api:
        try:
            began_s = time.monotonic()
            reply = await api.post(CHAT, stream=is_streamed, headers={TIMEOUT: "0.3"})
            assert time.monotonic() - began_s < 10
            assert "it took longer than 0.3 s (X-Request-Timeout)" in reply.text
            assert reply.text.count("it took longer") == 1
            if not is_streamed:
                assert reply.status_code == 504
        finally:
            gate.set()


async def test_what_came_while_a_step_hung_was_not_begun(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told not to ask again, although the engine had not seen it yet."""
    monkeypatch.setattr("gemserve.api.replies.event_reader.GRACE_S", 0.2)
    gate, hangs = threading.Event(), threading.Event()

    class HangingCore(FakeCore):
        def step(self) -> list[tuple[FakeJob, Event]]:
            hangs.set()
            gate.wait(30)
            return super().step()

    async with api_over(HangingCore(), tokenizer) as api:
        first = asyncio.create_task(api.post(CHAT))
        try:
            while not hangs.is_set():
                await asyncio.sleep(0.01)
            reply = await api.post(CHAT, headers={TIMEOUT: "0.3"})
        finally:
            gate.set()
        assert (await first).status_code == 200
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    assert "x-should-retry" not in reply.headers


async def test_a_client_that_reads_slowly_is_no_work(tokenizer: Any) -> None:
    """All of its answer was drawn, and others had to wait for it, or were refused."""
    core = FakeCore(FILTERED, *"abcdefgh")
    serving = serving_over(core, tokenizer)
    app = create_app(serving)
    body = json.dumps({**BODIES[CHAT], "stream": True}).encode()
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    reads, sent = asyncio.Event(), list[Message]()

    async def receive() -> Message:
        if not coming:
            await asyncio.Event().wait()
        return coming.pop()

    async def send(message: Message) -> None:
        sent.append(message)
        await reads.wait()

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
        **{"method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""},
        **{"root_path": "", "client": ("127.0.0.1", 1), "server": ("localhost", 80)},
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    task = asyncio.create_task(app(scope, receive, send))
    try:
        async with asyncio.timeout(20):
            while not sent or app.state.backlog._jobs:
                await asyncio.sleep(0.01)
        assert len(sent) == 1
        reads.set()
        await task
    finally:
        serving.engine.stop()
    assert b"".join(each.get("body", b"") for each in sent).count(b"[DONE]") == 1


async def test_a_key_is_told_when_what_comes_before_its_request_is_done(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other keys' requests counted too, though it has the server in turn with them."""
    monkeypatch.setattr(Backlog, "wait_s", lambda backlog, tenant: 9.6)
    monkeypatch.setattr(Backlog, "retry_after_s", lambda backlog: 60)
    async with api_over(FakeCore(), tokenizer, max_wait_s=5.0) as api:
        reply = await api.post(CHAT)
    assert reply.status_code == 503
    assert "will take about 9.6 s" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"] == "10"


@pytest.fixture
def slow_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Submitter._parse_and_build

    def parse_slowly(*arguments: Any) -> Any:
        time.sleep(0.4)
        return parse(*arguments)

    monkeypatch.setattr(Submitter, "_parse_and_build", parse_slowly)


@pytest.mark.usefixtures("slow_parsing")
async def test_a_text_that_is_long_to_parse_is_not_late_for_that(tokenizer: Any) -> None:
    """What took longer to parse than any may wait was refused for ever, on an idle server."""
    core = FakeCore(FILTERED, "fine")
    async with api_over(core, tokenizer, max_wait_s=0.3) as api:
        reply = await api.post(COMPLETIONS)
        assert reply.status_code == 200, reply.text
        assert core.requests[-1].begin_within_s == pytest.approx(0.3, abs=0.2)


@pytest.mark.usefixtures("slow_parsing")
async def test_texts_wait_no_longer_for_each_other_than_their_clients_do(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "fine")
    async with api_over(core, tokenizer, max_queue=100) as api:  # which parses a few at once
        replies = await asyncio.gather(
            *(api.post(COMPLETIONS, headers={TIMEOUT: "0.6"}) for _ in range(24))
        )
    errors = [reply.json()["error"]["message"] for reply in replies if reply.status_code == 503]
    assert any(error.startswith("Nobody has looked at it for") for error in errors)
    assert all(reply.status_code in (200, 503, 504) for reply in replies)
    assert len(core.requests) < 24


async def test_what_was_not_begun_is_not_charged(tokenizer: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    core = FakeCore(LATE)
    headers = {"Authorization": "Bearer one"}
    async with api_over(core, tokenizer, api_key_file=keys, tokens_per_minute=50) as api:
        for _ in range(4):
            reply = await api.post(COMPLETIONS, prompt="word " * 40, headers=headers)
            assert reply.status_code == 503, reply.text


async def test_short_requests_are_not_refused_after_long_ones(tokenizer: Any) -> None:
    """While they were parsed they counted as long as the last ones were."""
    core = FakeCore(FILTERED, "fine")
    limits = {"max_prompt_tokens": 100_000, "context_tokens": 100_000, "max_queue": 200}
    async with api_over(core, tokenizer, max_wait_s=2.0, **limits) as api:
        for _ in range(3):
            reply = await api.post(COMPLETIONS, prompt="The river runs past. " * 1000)
            assert reply.status_code == 200, reply.text
        replies = await asyncio.gather(*(api.post(COMPLETIONS, prompt="Hi") for _ in range(30)))
    assert [reply.status_code for reply in replies] == [200] * 30


async def test_what_was_let_in_is_not_asked_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was told that there is room, was parsed, and made all of them wait too long."""
    waits = iter((0.0, 9.0))
    monkeypatch.setattr(Backlog, "wait_s", lambda backlog, tenant: next(waits))
    async with api_over(FakeCore(FILTERED, "fine"), tokenizer, max_wait_s=0.5) as api:
        assert (await api.post(COMPLETIONS)).status_code == 200
        assert (await api.post(COMPLETIONS)).status_code == 503


@pytest.mark.usefixtures("slow_parsing")
async def test_time_in_which_a_text_waits_for_others_counts(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "fine")
    async with api_over(core, tokenizer, max_wait_s=30.0, max_queue=100) as api:
        await asyncio.gather(*(api.post(COMPLETIONS) for _ in range(12)))  # two or more at a time
    left = sorted(request.begin_within_s for request in core.requests)
    assert left[0] < 29.5
    assert 29.5 < left[-1] <= 30
