"""Requests whose first token would come too late are not begun, and the client is told so."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest

from gemserve.contract.events import Finished
from tests.fakes import CHAT, FILTERED, Api, FakeCore, api_over, data_of

pytestmark = pytest.mark.anyio
LATE = Finished(reason="error", completion_tokens=0, error="too late", is_late=True)
MESSAGES = "/v1/messages"
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


async def test_a_stream_whose_head_is_sent_gets_one_error(api: Api, core: FakeCore) -> None:
    core.script = (1.2, LATE)
    (*idle, error) = data_of(await api.post(CHAT, stream=True), has_idle=True)
    assert error["error"]["code"] == "queue_full"
    assert len(idle) == 1


async def test_anthropic_s_clients_see_an_overload(api: Api, core: FakeCore) -> None:
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    core.script = (LATE,)
    reply = await api.client.post(MESSAGES, json=body)
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert int(reply.headers["retry-after"]) >= 1
    core.script = (1.2, LATE)
    reply = await api.client.post(MESSAGES, json={**body, "stream": True})
    assert '"overloaded_error"' in reply.text


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
        assert await begin_within(api, core, {}, n=2) == math.inf


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
    assert reply.status_code == 500
    assert "it took longer than 0.3 s" in reply.json()["error"]["message"]
    assert time.monotonic() - began_s < 10
