"""A question is read before anything is found: for no longer than its client waits, or is there."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gemserve.api import app as app_module
from gemserve.api.requests.turns import TextWait
from gemserve.api.routes.operation import Routes
from gemserve.api.routes.submission import Submitter
from gemserve.api.serving import Serving
from gemserve.contract.events import Finished
from gemserve.contract.requests import Request
from gemserve.errors import WaitedTooLong
from gemserve.wings import AppParts, OpenedWing, Wing
from gemserve_library.api.excerpt_finder import LibraryExcerpts
from tests.fakes import CHAT, FILTERED, Api, FakeCore, api_over, wait_for_async

pytestmark = pytest.mark.anyio
TIMEOUT = "X-Request-Timeout"
LIBRARY = {"filter": {"library": "notes"}}


class NoShelf:
    """Has every library, and the question of every request."""

    requests: NoShelf

    def __init__(self) -> None:
        self.requests = self

    def check_names(self, tenant: bytes, names: Sequence[str]) -> None:
        pass

    def for_question(self, request: Request) -> Request:
        return replace(request, request_id="question")


@dataclass
class Opened(OpenedWing):
    """`submitter`: the application's."""

    submitter: Submitter | None = None

    def __post_init__(self) -> None:
        shelf: Any = NoShelf()
        self.excerpts = LibraryExcerpts(shelf, has_cache=False)

    def routes(self, parts: AppParts) -> Sequence[Routes]:
        self.submitter = parts.submitter
        return ()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    found = Opened()

    class Libraries(Wing):
        def open(self, serving: Serving) -> OpenedWing:
            return found

    monkeypatch.setattr(app_module, "wings", lambda: (Libraries(),))
    return found


@pytest.fixture
async def waiting(opened: Opened, tokenizer: Any) -> AsyncIterator[Api]:
    """A server whose questions are never read to their end."""
    gate = threading.Event()
    async with api_over(FakeCore(FILTERED, gate), tokenizer) as api:
        yield api
        gate.set()


async def test_a_question_that_takes_too_long_is_a_504(waiting: Api) -> None:
    """It was waited for without any limit."""
    began_s = time.monotonic()
    reply = await waiting.post(CHAT, headers={TIMEOUT: "0.2"}, **LIBRARY)
    assert time.monotonic() - began_s < 5
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
    assert "it took longer than 0.2 s (X-Request-Timeout)" in reply.json()["error"]["message"]
    assert reply.headers["x-should-retry"] == "false"


async def test_a_question_that_is_not_begun_is_a_503(waiting: Api) -> None:
    first = asyncio.create_task(waiting.post(CHAT, headers={TIMEOUT: "30"}))
    await wait_for_async(waiting.core.started.is_set)
    reply = await waiting.post(CHAT, headers={TIMEOUT: "0.2"}, **LIBRARY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    assert (await waiting.metrics())['admission_rejections_total{reason="queue_full"}'] == 1
    first.cancel()


async def test_a_search_waits_for_others_no_longer_than_its_request_may() -> None:
    """With `--max-wait` it was refused behind all searches before it, however long they took."""

    async def stay() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def read(_: Any) -> Finished:
        return Finished(reason="stop", completion_tokens=0)

    shelf: Any = SimpleNamespace(
        check_names=lambda *_: None,
        find=lambda *_: None,
        requests=SimpleNamespace(for_question=lambda request: request),
    )
    excerpts = LibraryExcerpts(shelf, has_cache=False)
    turns = excerpts.searches._short
    while turns._turns.free:
        await turns.take(b"")
    asked: dict[str, Any] = {
        "http": SimpleNamespace(receive=stay),
        "wanted": SimpleNamespace(libraries=("notes",), candidates=1, max_seconds=None),
        "alone": SimpleNamespace(tenant=b""),
        "again": None,
        "read": read,
    }
    finding = excerpts.put_in_front(**asked, wait=TextWait(0.1, "--max-wait"))
    with pytest.raises(WaitedTooLong, match=r"the limit is 0\.1 s \(--max-wait\)"):
        await asyncio.wait_for(finding, 5)


async def test_the_engine_is_told_when_it_must_have_begun(opened: Opened, tokenizer: Any) -> None:
    core = FakeCore(FILTERED)
    async with api_over(core, tokenizer, max_wait_s=7.0) as api:
        await api.post(CHAT, headers={TIMEOUT: "30"}, **LIBRARY)
    assert core.requests[0].request_id == "question"
    assert core.requests[0].begin_within_s == pytest.approx(7, abs=1)


async def test_nothing_is_read_for_a_client_that_has_left(waiting: Api, opened: Opened) -> None:
    """The question was read to its end, and its request kept a place in the queue."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "model": "fake", **LIBRARY})
    messages = [{"type": "http.request", "body": body.encode()}]
    left, sent = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    app: Any = waiting.client._transport.app  # type: ignore[attr-defined]
    serving = asyncio.create_task(app(scope, receive, send))
    await wait_for_async(waiting.core.started.is_set)
    assert opened.submitter is not None
    assert opened.submitter.preparing._requests.used == 0  # it has a place in the queue
    left.set()
    await wait_for_async(waiting.core.cancelled.is_set)
    await serving
    assert opened.submitter.preparing._requests.used == 0


async def test_a_question_takes_one_place_of_the_queue(waiting: Api) -> None:
    """It kept that of its request, too: with 128 places, 64 could ask."""
    engine = waiting.serving.engine
    asking = [asyncio.create_task(waiting.post(CHAT, **LIBRARY)) for _ in range(3)]
    await wait_for_async(lambda: engine.num_waiting == 2)
    asking.append(asyncio.create_task(waiting.post(CHAT, **LIBRARY)))
    await wait_for_async(lambda: engine.num_waiting == 3 or asking[-1].done())
    assert not asking[-1].done(), asking[-1].result().text
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
