"""`/openapi.json`: every route, every status that can be provoked, keys where they are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from gemserve.api.app import create_app
from gemserve.filtering.methods import SERVED_METHODS
from tests.fakes import BODIES, CHAT, COMPLETIONS, FILTERED, Api, FakeCore, api_over, serving_over
from tests.openapi_checks import (
    SELECTION,
    UNKNOWN,
    check_body,
    check_errors,
    check_failures,
    check_failures_in_streams,
    check_full_queue_and_dead_engine,
    check_integers,
    check_keys,
    check_unknown_document,
    described,
)

pytestmark = pytest.mark.anyio
DOCUMENTS = "/v1/documents"
GOOD: dict[str, dict[str, Any]] = {
    **BODIES,
    SELECTION: {"model": "fake", "prompt": "Hi"},
    DOCUMENTS: {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [50]},
}
STREAMED = (COMPLETIONS, CHAT)
ANSWERED = (*STREAMED, SELECTION)


def content_of(part: dict[str, Any]) -> dict[str, Any]:
    """A message of one part."""
    return {"role": "user", "content": [part]}


def operations_of(document: dict[str, Any]) -> set[str]:
    return {f"{method} {path}" for path, item in document["paths"].items() for method in item}


def test_every_route_is_described(core: FakeCore, tokenizer: Any) -> None:
    serving = serving_over(core, tokenizer)
    app = create_app(serving)
    serving.engine.stop()
    document = app.openapi()
    assert operations_of(document) == operations_of(FastAPI.openapi(app))  # what routes there are
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document))) == known


async def test_the_methods_of_the_table_are_listed(api: Api) -> None:
    """Those that only evaluations may name are not."""
    schemas = (await described(api)).document["components"]["schemas"]
    (method, _) = schemas["FilterBody"]["properties"]["method"]["anyOf"]
    (name, *_) = schemas["ChatBody"]["properties"]["filter"]["anyOf"]
    report = schemas["FilterReport"]["properties"]["method"]
    for schema in (method, name, report):
        assert schema["enum"] == list(SERVED_METHODS)


async def test_no_operation_promises_what_is_never_answered(api: Api) -> None:
    document = (await described(api)).document
    statuses = {
        status
        for item in document["paths"].values()
        for operation in item.values()
        for status in operation["responses"]
    }
    assert statuses == {"200", "400", "403", "404", "413", "415", "500", "503", "504"}
    assert "securitySchemes" not in document["components"]
    assert "HTTPValidationError" not in json.dumps(document)


async def test_keys_and_quotas_are_described_where_there_are_some(
    tokenizer: Any, tmp_path: Path
) -> None:
    await check_keys(
        tokenizer,
        tmp_path,
        GOOD,
        is_open=("/health", "/ping", "/ready", "/version", "/metrics"),
        needs_key=("/tokenizer_info", "/v1/models", "/v1/adapters", "/server_info"),
    )


@pytest.mark.parametrize("path", GOOD)
async def test_errors_are_as_described(tokenizer: Any, path: str) -> None:
    await check_errors(tokenizer, path, GOOD[path])


@pytest.mark.parametrize("path", ANSWERED)
async def test_failures_are_as_described(api: Api, path: str) -> None:
    await check_failures(api, path, GOOD[path])


@pytest.mark.parametrize("path", STREAMED)
async def test_failures_in_streams_are_as_described(api: Api, path: str) -> None:
    await check_failures_in_streams(api, path, GOOD[path])


async def test_a_full_queue_a_dead_engine_and_a_stopping_one_are_as_described(
    tokenizer: Any,
) -> None:
    bodies = {path: GOOD[path] for path in ANSWERED}
    await check_full_queue_and_dead_engine(tokenizer, bodies)
    async with api_over(FakeCore(), tokenizer) as api:
        api.serving.engine.drain(1)
        reply = await api.client.get("/ready")
        assert reply.json()["status"] == "shutting down"
        (await described(api)).check(reply)


async def test_calls_made_freely_are_as_described(api: Api) -> None:
    document = await described(api)
    tools = [{"type": "function", "function": {"name": "stop", "parameters": {}}}]
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    for script in ((FILTERED, call, call), (FILTERED, "no ", "call")):
        api.core.script = script
        for stream in (False, True):
            reply = await api.post(CHAT, tools=tools, stream=stream)
            assert reply.status_code == 200
            document.check(reply)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"document": UNKNOWN}),
        (SELECTION, {"document": UNKNOWN}),
        (CHAT, {"messages": [content_of({"type": "file", "file": {"file_id": UNKNOWN}})]}),
    ],
)
async def test_an_unknown_document_is_not_found_as_described(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    await check_unknown_document(api, path, {**GOOD[path], **fields})


async def test_another_model_is_not_found_as_described(api: Api) -> None:
    document = await described(api)
    document.check(await api.client.get("/v1/models/other"), "/v1/models/{name}")


@pytest.mark.parametrize("path", STREAMED)
async def test_every_integer_may_be_written_with_a_point(api: Api, path: str) -> None:
    await check_integers(api, path, GOOD[path])


CHATTED = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# path, fields, does the schema accept them? The server must agree.
BODIES_TRIED: list[tuple[str, dict[str, Any], bool]] = [
    *((COMPLETIONS, {"filter": f}, True) for f in (None, "none", {}, {"keep": "auto"})),
    *((COMPLETIONS, {"filter": f}, False) for f in ("most", 3, {"keep": "most"}, {"kep": 1})),
    *((COMPLETIONS, {"filter": {"keep": k}}, True) for k in (16, 16.0, 0.5, None)),
    *((COMPLETIONS, {"filter": {"keep": k}}, False) for k in (15, 16.5, 0, 1, True, 1 << 31)),
    *((COMPLETIONS, {"stop": s}, True) for s in (None, "a", ["a"] * 16, [])),
    *((COMPLETIONS, {"stop": s}, False) for s in ("", ["a"] * 17, ["a", ""], 3, [3])),
    *((COMPLETIONS, {"prompt": p}, True) for p in ("a", [5], [5.0], ["a", "b"], [[5], [6]])),
    *(
        (COMPLETIONS, {"prompt": p}, False)
        for p in ("", [], [5.5], ["a", ""], [[]], [-1], [5, "a"])
    ),
    (COMPLETIONS, {"prompt": ["a"] * 129}, False),
    (COMPLETIONS, {"logit_bias": {"5": 1, "0": -100.0}}, True),
    *((COMPLETIONS, {"logit_bias": {key: 1}}, False) for key in ("05", "-1", "x", "")),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(1025)}}, False),
    *((COMPLETIONS, {field: 2.0}, True) for field in ("n", "top_k", "seed", "max_tokens")),
    *((COMPLETIONS, {field: 2.5}, False) for field in ("n", "top_k", "seed", "max_tokens")),
    (COMPLETIONS, {"filter": {"layer": 1.0}}, True),
    *((COMPLETIONS, {"filter": {"heads": h}}, True) for h in (None, [[1, 7]], [[0, 0], [2.0, 1]])),
    *(
        (COMPLETIONS, {"filter": {"heads": h}}, False)
        for h in ([], [[1]], [[1, 2, 3]], [[-1, 0]], [[0, 0], [0, 0]], [[0, 0]] * 33, "0.1")
    ),
    *((COMPLETIONS, {"filter": {"window": w}}, True) for w in (None, 256, 512.0, "auto", "off")),
    *((COMPLETIONS, {"filter": {"window": w}}, False) for w in (255, 300.5, True, "most", [256])),
    (COMPLETIONS, {"stop_token_ids": [5.0]}, True),
    (COMPLETIONS, {"response_format": {"type": "text"}}, True),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, False),
    (
        COMPLETIONS,
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        False,
    ),
    (CHAT, {"messages": [CHATTED, {"role": "assistant", "tool_calls": [CALL]}]}, True),
    (CHAT, {"messages": [{**CHATTED, "tool_calls": [CALL]}]}, False),
    (CHAT, {"messages": [CHATTED, {"role": "assistant"}]}, True),
    (CHAT, {"messages": [CHATTED, {"role": "assistant", "content": None}]}, True),
    *((CHAT, {"messages": [CHATTED, {"role": role}]}, True) for role in ("tool", "function")),
    *((CHAT, {"messages": [{"role": role}]}, False) for role in ("user", "system")),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, True),
    (CHAT, {"response_format": {"type": "text", "schema": {}}}, False),
    (CHAT, {"tool_choice": {"type": "function"}, "tools": []}, False),
    (CHAT, {"messages": [CHATTED, {"role": "tool", "tool_calls": [CALL]}]}, False),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, True),
    *((CHAT, {"chat_template_kwargs": {n: 1}}, False) for n in ("tools", "bos_token")),
    (SELECTION, {"chat_template_kwargs": {}}, False),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "a"}}}]},
        False,
    ),
    (DOCUMENTS, {"ttl": 5.0, "pin": True, "filter": "none", "purpose": "user_data"}, True),
    (DOCUMENTS, {"expires_after": {"anchor": "created_at", "seconds": 9}}, True),
    *((DOCUMENTS, fields, False) for fields in ({"ttl": 0}, {"text": ""}, {"pin": "yes"})),
    (SELECTION, {"messages": [CHATTED]}, False),
    (SELECTION, {"prompt": None, "messages": [CHATTED]}, True),
    (SELECTION, {"prompt": None}, False),
    ("/tokenize", {"add_generation_prompt": True}, False),
    ("/tokenize", {"chat_template_kwargs": {}}, False),
    ("/tokenize", {"prompt": None, "messages": [CHATTED], "add_generation_prompt": True}, True),
    ("/detokenize", {"tokens": []}, True),
    ("/detokenize", {"tokens": [5.0]}, True),
    ("/detokenize", {"tokens": [True]}, False),
    *((COMPLETIONS, {"structured_outputs": f}, True) for f in (None, {"regex": "a"})),
    (COMPLETIONS, {"structured_outputs": {"json_object": True, "json": None}}, True),
    *((COMPLETIONS, {"structured_outputs": {"json": j}}, True) for j in ({}, "{}")),
    *((COMPLETIONS, {"structured_outputs": f}, False) for f in ({}, {"regex": None}, "a")),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, False),
    (COMPLETIONS, {"structured_outputs": {"json_object": False}}, False),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, False),
    *((CHAT, {"guided_choice": c}, False) for c in ([], [""], "a", [3])),
    (CHAT, {"guided_choice": ["a"], "guided_decoding_backend": "x", "guided_json": None}, True),
    (CHAT, {"return_token_ids": 1}, False),
]


@pytest.mark.parametrize(
    ("path", "fields", "is_good"), BODIES_TRIED, ids=lambda value: str(value)[:50]
)
async def test_schema_and_server_accept_the_same_bodies(
    api: Api, path: str, fields: dict[str, Any], is_good: bool
) -> None:
    await check_body(api, path, {**GOOD[path], **fields}, is_good)
