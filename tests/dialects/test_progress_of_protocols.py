"""Progress in /v1/responses and /v1/messages, in events that their clients know."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from gemserve.engine.sequence.progress import Progress
from tests import anthropic_requests, openai_responses_requests
from tests.fakes import FILTERED, Api, FakeCore, live_server, serving_over

pytestmark = pytest.mark.anyio
READING = Progress(phase="filter", tokens=20, total=100, cached=10, eta_s=1.5)
TOLD = {"phase": "filter", "tokens": 20, "total": 100, "eta_ms": 1500}
SCRIPT = (READING, 0.6, FILTERED, "a", 0.3, "b")
ASKED: dict[str, Any] = {"stream_options": {"include_progress": True}}


async def test_a_response_s_progress_is_in_events_of_openai(api: Api, core: FakeCore) -> None:
    core.script = SCRIPT
    reply = await openai_responses_requests.post(api, stream=True, **ASKED)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    told = [event for event in events if "progress" in event]
    assert {event["type"] for event in told} == {"response.in_progress"}
    assert TOLD in [event["progress"] for event in told]
    last = max(index for index, event in enumerate(events) if "progress" in event)
    assert not [e for e in events[:last] if e["type"] == "response.output_text.delta"]
    core.script = SCRIPT
    plain = await openai_responses_requests.streamed(api)
    assert not [event for event in plain if "progress" in event]


async def test_a_message_s_progress_is_in_pings(api: Api, core: FakeCore) -> None:
    core.script = SCRIPT
    events = await anthropic_requests.streamed(api, **ASKED)
    told = [event for event in events if "progress" in event]
    assert {event["type"] for event in told} == {"ping"}
    assert TOLD in [event["progress"] for event in told]
    core.script = SCRIPT
    plain = await anthropic_requests.streamed(api)
    assert not [event for event in plain if "progress" in event]


async def test_openai_s_client_puts_such_a_stream_together(tokenizer: Any) -> None:
    """It raises an error at what comes before `response.created`."""

    def stream(url: str) -> tuple[list[str], str]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with (
            client,
            client.responses.stream(model="fake", input="Hi", extra_body=ASKED) as events,
        ):
            kinds = [event.type for event in events]
            return kinds, events.get_final_response().output_text

    with live_server(serving_over(FakeCore(*SCRIPT), tokenizer)) as url:
        kinds, text = await asyncio.to_thread(stream, url)
    assert text == "ab"
    assert kinds.count("response.in_progress") >= 2
