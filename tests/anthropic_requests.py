"""Requests to /v1/messages over a scripted core, and what a client makes of a stream's events."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.described import events_of
from tests.fakes import FILTERED, Api

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "How warm is it?"}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
STOP = {"type": "custom", "name": "stop", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, STOP]
FORCED = (FILTERED, '{"name": "weather", ', '"arguments": ', '{"place": "he', 're"}', "}")
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "here"}}</tool_call>'
TEXT = "Héllo 🌍!"


async def post(api: Api, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    tokens = {"max_tokens": 50} if path == MESSAGES else {}
    body = {"model": "fake", **tokens, "messages": [USER], **fields}
    return await api.client.post(path, json=body)


async def whole(api: Api, **fields: Any) -> dict[str, Any]:
    reply = await post(api, **fields)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()
    return message


async def streamed(api: Api, **fields: Any) -> list[dict[str, Any]]:
    """The stream's events, each named by its type, of which only the last one ends the stream."""
    reply = await post(api, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.text)
    data: list[dict[str, Any]] = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [event["type"] for event in data]
    is_end = [event["type"] in ("message_stop", "error") for event in data]
    assert is_end == [*[False] * (len(data) - 1), True]
    return data


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from the events; blocks come one after the other."""
    message: dict[str, Any] = {}
    json_text: dict[int, str] = {}
    is_open = False
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
            assert (message["content"], message["stop_reason"]) == ([], None)
        elif kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            assert not event["content_block"].get("input")
            message["content"].append(event["content_block"])
            is_open = True
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            if event["delta"]["type"] == "text_delta":
                message["content"][-1]["text"] += event["delta"]["text"]
            else:
                so_far = json_text.get(event["index"], "")
                json_text[event["index"]] = so_far + event["delta"]["partial_json"]
        elif kind == "content_block_stop":
            is_open = False
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert not is_open
    for index, text in json_text.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**{k: v for k, v in message.items() if k != "id"}, "content": blocks}
