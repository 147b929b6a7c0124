"""Requests to /v1/responses over a scripted core, and what a client makes of a stream's events."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.described import events_of
from tests.fakes import FILTERED, Api

RESPONSES = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "!", "parameters": PARAMETERS}
STOP = {"type": "function", "name": "stop", "parameters": None, "strict": True}
TOOLS = [WEATHER, STOP]
NAMED = {"type": "function", "name": "weather"}
FORCED = (FILTERED, '{"name": "weather", ', '"arguments": ', '{"place": "he', 're"}', "}")
CALLS = '<tool_call>{"name": "weather", "arguments": {"place": "here"}}</tool_call>'
LOGPROBS = "message.output_text.logprobs"


async def post(api: Api, **fields: Any) -> httpx.Response:
    return await api.client.post(RESPONSES, json={"model": "fake", "input": "Hi", **fields})


async def whole(api: Api, **fields: Any) -> dict[str, Any]:
    reply = await post(api, **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def streamed(api: Api, **fields: Any) -> list[dict[str, Any]]:
    """The stream's events; each is named by its type, and they are numbered without a gap."""
    reply = await post(api, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    assert "x-gemserve-filter" in reply.headers
    events = events_of(reply.text)
    data: list[dict[str, Any]] = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [event["type"] for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    ends = ("response.completed", "response.incomplete", "response.failed")
    assert [event["type"] in ends for event in data] == [*[False] * (len(data) - 1), True]
    return data


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client builds from the events; what is done must say the same."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "output_text.delta":
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            assert event["item_id"] == items[event["output_index"]]["id"]
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[event["output_index"]]["arguments"]
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
            assert event["item"] == items[event["output_index"]]
    return items


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]
