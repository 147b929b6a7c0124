"""However a request ends, its key's place is free again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from gemserve.api.app import create_app
from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    replace_file,
    serving_over,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
either = pytest.mark.parametrize("stream", [True, False])


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return replace_file(tmp_path / "keys", "alice", "bob")


@asynccontextmanager
async def one_at_a_time(core: FakeCore, tokenizer: Any, key_file: str) -> AsyncIterator[Api]:
    settings = {"api_key_file": key_file, "concurrency_per_key": 1, "max_body_bytes": 10_000}
    async with api_over(core, tokenizer, **settings) as api:
        yield api


ENDINGS: list[tuple[tuple[Any, ...], dict[str, Any], int]] = [
    ((FILTERED, "ok"), {}, 200),
    ((MemoryError("boom"),), {}, 500),
    ((FILTERED, "a", MemoryError("boom")), {}, 500),
    ((FILTERED,), {"temperature": 9}, 400),
    ((FILTERED,), {"model": "other"}, 404),
    ((FILTERED,), {"prompt": "x" * 20_000}, 413),
]


@either
@pytest.mark.parametrize(("script", "fields", "status"), ENDINGS)
async def test_however_a_request_ends_its_place_is_free(
    tokenizer: Any,
    key_file: str,
    stream: bool,
    script: tuple[Any, ...],
    fields: dict[str, Any],
    status: int,
) -> None:
    core = FakeCore(*script)
    async with one_at_a_time(core, tokenizer, key_file) as api:
        for _ in range(3):
            reply = await api.post(COMPLETIONS, headers=ALICE, stream=stream, **fields)
            has_failed_late = stream and status == 500 and script[0] is FILTERED
            assert reply.status_code == (200 if has_failed_late else status)
            if has_failed_late:
                assert "boom" in data_of(reply)[-1]["error"]["message"]


@either
async def test_a_full_queue_gives_the_place_back(
    tokenizer: Any, key_file: str, stream: bool
) -> None:
    gate = threading.Event()
    settings = {"api_key_file": key_file, "concurrency_per_key": 2}
    async with api_over(FakeCore(FILTERED, gate), tokenizer, max_queue=1, **settings) as api:
        first = asyncio.create_task(api.post(CHAT, headers=BOB))
        await wait_for_async(api.core.started.is_set)
        second = asyncio.create_task(api.post(CHAT, headers=BOB))
        await wait_for_async(lambda: api.serving.engine.num_waiting == 1)
        for _ in range(5):
            assert (await api.post(CHAT, headers=ALICE, stream=stream)).status_code == 503
        gate.set()
        await asyncio.gather(first, second)


class Caller:
    """One request by hand, whose client can leave or break at any moment."""

    def __init__(self, *, stream: bool, breaks: bool = False, body: bytes | None = None) -> None:
        whole = json.dumps({**BODIES[CHAT], "stream": stream}).encode()
        self._messages: list[dict[str, Any]] = [
            {
                "type": "http.request",
                "body": whole if body is None else body,
                "more_body": bool(body),
            }
        ]
        self._breaks = breaks
        self._left = asyncio.Event()
        self.status: int | None = None
        self.seen = b""

    async def call(self, app: Any) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", b"Bearer alice")],
            "server": ("test", 80),
        }
        await app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self._breaks:
            raise OSError("connection lost")
        else:
            self.seen += message["body"]


@asynccontextmanager
async def application(core: FakeCore, tokenizer: Any, key_file: str) -> AsyncIterator[Any]:
    serving = serving_over(core, tokenizer, api_key_file=key_file, concurrency_per_key=1)
    try:
        yield create_app(serving)
    finally:
        serving.engine.stop()


async def assert_free(core: FakeCore, app: Any) -> None:
    core.script = (FILTERED, "fine")
    caller = Caller(stream=False)
    await caller.call(app)
    assert caller.status == 200


@either
async def test_a_client_that_leaves_frees_its_place(
    tokenizer: Any, key_file: str, stream: bool
) -> None:
    core = FakeCore(FILTERED, "one", threading.Event())
    async with application(core, tokenizer, key_file) as app:
        caller, second = Caller(stream=stream), Caller(stream=stream)
        running = asyncio.create_task(caller.call(app))
        await wait_for_async(core.started.is_set)
        if stream:
            await wait_for_async(lambda: b"one" in caller.seen)
        await second.call(app)
        assert second.status == 429
        caller.leave()
        async with asyncio.timeout(5):
            await running
        assert core.cancelled.is_set()
        await assert_free(core, app)


async def test_a_client_that_leaves_within_its_body_frees_its_place(
    tokenizer: Any, key_file: str
) -> None:
    core = FakeCore()
    async with application(core, tokenizer, key_file) as app:
        caller = Caller(stream=True, body=b"{")
        caller.leave()
        await caller.call(app)
        assert core.requests == []
        await assert_free(core, app)


@either
async def test_a_connection_that_breaks_frees_the_place(
    tokenizer: Any, key_file: str, stream: bool
) -> None:
    core = FakeCore(FILTERED, "one", "two")
    async with application(core, tokenizer, key_file) as app:
        with pytest.raises((OSError, ClientDisconnect)):
            await Caller(stream=stream, breaks=True).call(app)
        await assert_free(core, app)


@either
async def test_a_request_that_is_cancelled_frees_its_place(
    tokenizer: Any, key_file: str, stream: bool
) -> None:
    """As a server does to what outlasts its shutdown."""
    core = FakeCore(FILTERED, "one", threading.Event())
    async with application(core, tokenizer, key_file) as app:
        running = asyncio.create_task(Caller(stream=stream).call(app))
        await wait_for_async(core.started.is_set)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await wait_for_async(core.cancelled.is_set)
        await assert_free(core, app)
