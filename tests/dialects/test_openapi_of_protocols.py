"""`/openapi.json` of the other protocols: what it says of their endpoints, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Api
from tests.openapi_checks import (
    SAID,
    UNKNOWN,
    check_body,
    check_errors,
    check_failures,
    check_failures_in_streams,
    check_full_queue_and_dead_engine,
    check_integers,
    check_keys,
    check_unknown_document,
)

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"
MESSAGED, COUNTED = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
GOOD: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "fake", "input": "Hi"},
    MESSAGED: {"model": "fake", "max_tokens": 9, "messages": [SAID]},
    COUNTED: {"model": "fake", "messages": [SAID]},
    OLLAMA_CHAT: {"model": "fake", "messages": [SAID], "stream": False},
    OLLAMA_GENERATE: {"model": "fake", "prompt": "Hi", "stream": False},
    "/api/show": {"model": "fake"},
}
STREAMED = (RESPONSES, MESSAGED, OLLAMA_CHAT, OLLAMA_GENERATE)
FILE = {"role": "user", "content": [{"type": "input_file", "file_id": UNKNOWN}]}
BLOCK = {"type": "document", "source": {"type": "file", "file_id": UNKNOWN}}


async def test_keys_and_quotas_are_described_where_there_are_some(
    tokenizer: Any, tmp_path: Path
) -> None:
    await check_keys(tokenizer, tmp_path, GOOD, needs_key=("/api/tags",))


@pytest.mark.parametrize("path", GOOD)
async def test_errors_are_as_described(tokenizer: Any, path: str) -> None:
    await check_errors(tokenizer, path, GOOD[path])


@pytest.mark.parametrize("path", STREAMED)
async def test_failures_are_as_described(api: Api, path: str) -> None:
    await check_failures(api, path, GOOD[path])


@pytest.mark.parametrize("path", STREAMED)
async def test_failures_in_streams_are_as_described(api: Api, path: str) -> None:
    await check_failures_in_streams(api, path, GOOD[path])


async def test_a_full_queue_and_a_dead_engine_are_as_described(tokenizer: Any) -> None:
    bodies = {path: GOOD[path] for path in STREAMED}
    await check_full_queue_and_dead_engine(tokenizer, bodies)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": [FILE]}),
        *((path, {"messages": [{**SAID, "content": [BLOCK]}]}) for path in (MESSAGED, COUNTED)),
    ],
)
async def test_an_unknown_document_is_not_found_as_described(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    await check_unknown_document(api, path, {**GOOD[path], **fields})


@pytest.mark.parametrize("path", STREAMED)
async def test_every_integer_may_be_written_with_a_point(api: Api, path: str) -> None:
    await check_integers(api, path, GOOD[path])


# path, fields, does the schema accept them? The server must agree.
BODIES_TRIED: list[tuple[str, dict[str, Any], bool]] = [
    (RESPONSES, {"background": False, "top_logprobs": 0.0}, True),
    (RESPONSES, {"background": 0}, False),
    (RESPONSES, {"input": []}, False),
    (RESPONSES, {"tools": [{}]}, False),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "anything": None}]}, True),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "anything": 1}]}, False),
    (RESPONSES, {"input": [{"type": None, "role": "user", "content": "x"}]}, True),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, False),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, False),
    (MESSAGED, {"messages": [{**SAID, "id": None}], "thinking": {"type": "disabled"}}, True),
    (MESSAGED, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    (MESSAGED, {"thinking": {"type": "enabled", "budget_tokens": 10**30}}, False),
    (MESSAGED, {"mcp_servers": [], "thread": None, "compaction": None}, True),
    (MESSAGED, {"mcp_servers": [{}]}, False),
    (MESSAGED, {"thread": {"type": "create"}}, False),
    (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "custom", "name": "x"}]}, True),
    (RESPONSES, {"tools": [{"type": "telepathy"}]}, False),
    (MESSAGED, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, False),
    (MESSAGED, {"stop_sequences": [""]}, False),
    (MESSAGED, {"max_tokens": None}, False),
    (COUNTED, {"max_tokens": 9}, False),
    (OLLAMA_CHAT, {"format": "", "think": "low", "keep_alive": -1, "tools": []}, True),
    (OLLAMA_CHAT, {"messages": [{**SAID, "images": [], "tool_calls": None, "x": None}]}, True),
    (OLLAMA_CHAT, {"messages": [{**SAID, "images": "x"}]}, False),
    (OLLAMA_CHAT, {"format": "yaml"}, False),
    (OLLAMA_CHAT, {"think": "very"}, False),
    *((OLLAMA_GENERATE, {"options": {"num_predict": n}}, True) for n in (-1, -2.0, 3.0, None)),
    *((OLLAMA_GENERATE, {"options": {"num_predict": n}}, False) for n in (-3, 0, 1.5)),
    *((OLLAMA_GENERATE, {"options": {"mirostat": m}}, m == 0) for m in (0, 0.0, 1)),
    (OLLAMA_GENERATE, {"options": {"typical_p": 1, "tfs_z": 1.0}}, True),
    (OLLAMA_GENERATE, {"options": {"typical_p": 0.5}}, False),
    (OLLAMA_GENERATE, {"raw": True}, False),
    (OLLAMA_GENERATE, {"raw": False, "context": [], "suffix": "", "top_logprobs": 0}, True),
    ("/api/show", {"verbose": 3}, False),
]


@pytest.mark.parametrize(
    ("path", "fields", "is_good"), BODIES_TRIED, ids=lambda value: str(value)[:50]
)
async def test_schema_and_server_accept_the_same_bodies(
    api: Api, path: str, fields: dict[str, Any], is_good: bool
) -> None:
    await check_body(api, path, {**GOOD[path], **fields}, is_good)
