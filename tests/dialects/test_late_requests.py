"""Requests that are not begun get 503 and `Retry-After` in each dialect, streamed or not."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.contract.events import Finished
from tests.fakes import Api, FakeCore

pytestmark = pytest.mark.anyio
LATE = Finished(
    reason="error", completion_tokens=0, error="too late", is_unread=True, late="not_begun"
)
SAID = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": SAID},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_never_began_has_the_status(
    api: Api, core: FakeCore, path: str
) -> None:
    """Libraries ask again after a 503, and not after an error in a stream."""
    core.script = (LATE,)
    body = {"model": "fake", "stream": True, **BODIES[path]}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 503, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["retry-after"]) >= 1


async def test_anthropic_s_clients_see_an_overload(api: Api, core: FakeCore) -> None:
    path = "/v1/messages"
    body = {"model": "fake", **BODIES[path]}
    core.script = (LATE,)
    reply = await api.client.post(path, json=body)
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert int(reply.headers["retry-after"]) >= 1
    core.script = (1.2, LATE)
    reply = await api.client.post(path, json={**body, "stream": True})
    assert '"overloaded_error"' in reply.text
