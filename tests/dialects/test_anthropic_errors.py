"""Errors of `/v1/messages`: in Anthropic's form, whoever makes them, and once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.contract.events import Finished
from tests.described import events_of
from tests.fakes import FILTERED, Api, FakeCore, api_over, replace_file

pytestmark = pytest.mark.anyio
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "How warm is it?"}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}


async def post(api: Api, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    return await api.client.post(
        path, json={"model": "fake", "max_tokens": 50, "messages": [USER], **fields}
    )


def message_of(reply: httpx.Response, status: int, kind: str) -> str:
    """The message of an error that has Anthropic's form and nothing else."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert len(reply.content) < 2048
    return str(body["error"]["message"])


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}, USER]}


@pytest.mark.parametrize(
    ("fields", "start", "word"),
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens=0", "1"),
        ({"max_tokens": 10**30}, "max_tokens=1", "2147483648"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "messages.1", "continue"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "user"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "empty"),
        (said({"type": "text", "text": "x"}, IMAGE), "messages.1.content.1", "image is not read"),
        (
            said({"type": "document", "source": {"type": "base64", "data": "x"}}),
            "messages.1.content.0.source",
            "base64 is not read",
        ),
        (said({"type": "server_tool_use"}), "messages.1.content.0", "runs no tools"),
        (said({**RESULT, "tool_use_id": 3}), "messages.1.content.0.tool_use_id", "string"),
        (said(RESULT, role="assistant"), "messages.1.content.0", "role user"),
        (said(USE), "messages.1.content.0", "role assistant"),
        ({"thinking": {"type": "deep"}}, "thinking.type='deep'", "must be one of disabled"),
        (said({"type": "text", "text": "x"}, {"type": "text"}), "messages.1.content.1.text", "req"),
        (said({"text": "x"}), "messages.1.content.0.type:", "required"),
        (said({"type": "text", "text": "x", "more": 1}), "messages.1.content.0.more", "unknown"),
        (said({**RESULT, "content": 3}), "messages.1.content.0.content=3", "a text or a list"),
        (
            said({"type": "document", "source": {"type": "text", "text": "x"}}),
            "messages.1.content.0.source.data",
            "required",
        ),
        (
            said({"type": "document", "source": {"type": "x"}}),
            "messages.1.content.0.source.type='x'",
            "must be one of file",
        ),
        ({"system": 3}, "system=3", "a text or a list"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type='x'", "must be one of auto"),
        ({"tool_choice": {"type": "tool", "tool": {"name": "x"}}}, "tool_choice.name", "required"),
        ({"fallbacks": 3}, "fallbacks=3", "a text or a list"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**30}}, "thinking.budget_t", "2147"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools.1", "bash_20250124"),
        ({"tools": [{"name": "weather"}]}, "tools.0.input_schema", "required"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
            "tools.0.input_schema",
            "object",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "weather"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "x"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "object"),
        (
            {
                "tools": [{**TOOL, "input_schema": {"type": "object", "not": {}}, "strict": True}],
                "tool_choice": {"type": "tool", "name": "weather"},
            },
            "tools.0.input_schema",
            "not",
        ),
        ({"stop_sequences": [""]}, "stop_sequences.0", "1 character"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type", "json"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
            "not",
        ),
        ({"container": {"skills": [{}]}}, "container.skills", "runs no code"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "calls no MCP servers"),
        ({"compaction": {"type": "summarize"}}, "compaction", "does not summarize"),
        ({"thread": {"type": "create"}}, "thread", "nothing is stored"),
        (
            {"context_management": {"edits": [{"type": "x"}]}},
            "context_management.edits.0.type",
            "pattern",
        ),
        ({"context_management": {"keep": 1}}, "context_management.keep", "unknown field"),
        ({"speed": "slow"}, "speed", "standard"),
        ({"output_format": {"type": "yaml"}}, "output_format.type", "json"),
        ({"output_format": {**FORM, "schema": {"not": {}}}}, "output_format.schema", "not"),
        (
            {"output_format": FORM, "output_config": {"format": FORM}},
            "output_format",
            "means the same",
        ),
        ({"stop": ["x"]}, "stop", "unknown field"),
    ],
)
async def test_what_is_wrong_is_named(
    api: Api, fields: dict[str, Any], start: str, word: str
) -> None:
    message = message_of(await post(api, **fields), 400, "invalid_request_error")
    assert message.startswith(start)
    assert word in message
    assert api.core.requests == []


async def test_max_tokens_is_required(api: Api) -> None:
    reply = await api.client.post(MESSAGES, json={"model": "fake", "messages": [USER]})
    assert message_of(reply, 400, "invalid_request_error") == "max_tokens: required"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_every_part_of_the_api_speaks_the_same(
    tokenizer: Any, tmp_path: Path, path: str
) -> None:
    keys = replace_file(tmp_path / "keys", "sk-a")
    settings: dict[str, Any] = {
        "api_key_file": keys,
        "requests_per_minute": 6,
        "max_body_bytes": 1000,
    }
    body = {"model": "fake", "messages": [USER], **({"max_tokens": 9} if path == MESSAGES else {})}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        key = {"x-api-key": "sk-a", "anthropic-version": "2023-06-01"}
        refused = await api.client.post(path, json=body)
        message_of(refused, 401, "authentication_error")
        assert refused.headers["www-authenticate"] == "Bearer"
        for content, status, kind in (
            (json.dumps(body), 200, None),
            ("{", 400, "invalid_request_error"),
            (json.dumps({**body, "model": "gone"}), 404, "not_found_error"),
            (" " * 1001, 413, "request_too_large"),
        ):
            reply = await api.client.post(path, content=content, headers=key)
            if kind is None:
                assert reply.status_code == status
                assert reply.headers["request-id"] == reply.headers["x-request-id"]
            else:
                message_of(reply, status, kind)
        message_of(await api.client.get(path, headers=key), 405, "invalid_request_error")
        nowhere = await api.client.post(f"{path}/nowhere", headers=key)
        message_of(nowhere, 404, "not_found_error")
        assert (await api.client.post(path, json=body, headers=key)).status_code == 200
        late = await api.client.post(path, json=body, headers=key)
        message_of(late, 429, "rate_limit_error")
        assert int(late.headers["retry-after"]) > 0


async def test_a_full_queue_is_an_overload(tokenizer: Any) -> None:
    gate = threading.Event()
    async with api_over(FakeCore(FILTERED, gate), tokenizer, max_queue=0) as api:
        try:
            reply = await post(api)
            message_of(reply, 503, "overloaded_error")
            assert int(reply.headers["retry-after"]) > 0
        finally:
            gate.set()


@pytest.mark.parametrize("script", [(FILTERED, "a"), (FILTERED,), (1.2,)])
async def test_a_failure_ends_the_stream_once(tokenizer: Any, script: tuple[Any, ...]) -> None:
    core = FakeCore(*script, RuntimeError("no memory"))
    async with api_over(core, tokenizer) as api:
        assert "no memory" in message_of(await post(api), 500, "api_error")
        reply = await post(api, stream=True)
        assert reply.status_code == 200
        kinds = [event["event"] for event in events_of(reply.text)]
        assert kinds.count("error") == 1
        assert kinds[-1] == "error"
        assert "message_stop" not in kinds
        error = json.loads(events_of(reply.text)[-1]["data"])
        assert set(error) == {"type", "error", "request_id"}
        assert error["error"]["type"] == "api_error"
        assert "no memory" in error["error"]["message"]
        assert error["request_id"] == reply.headers["request-id"]


async def test_an_aborted_request_is_an_error(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, Finished(reason="abort", completion_tokens=0))
    async with api_over(core, tokenizer) as api:
        message_of(await post(api), 503, "api_error")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/responses/resp_1", "nothing is stored"),
    ],
)
async def test_what_other_servers_serve_is_a_404_that_says_so(
    api: Api, path: str, word: str
) -> None:
    for reply in (await api.client.post(path, json={}), await api.client.get(path)):
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert word in error["message"]
        assert "does not serve" in error["message"]
        assert path not in (await api.client.get("/openapi.json")).json()["paths"]
