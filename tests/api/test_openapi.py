"""`/openapi.json`: every route, every status that can be provoked, keys where they are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from gemserve.api.app import create_app
from gemserve.contract.events import Finished
from gemserve.filtering.methods import SERVED_METHODS
from tests.described import Described
from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    replace_file,
    serving_over,
)

pytestmark = pytest.mark.anyio
RESPONSES, SELECTION = "/v1/responses", "/v1/filter"
MESSAGED, COUNTED = "/v1/messages", "/v1/messages/count_tokens"
DOCUMENTS = "/v1/documents"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
UNKNOWN = "doc-" + "0" * 32
SAID = {"role": "user", "content": "Hi"}
GOOD: dict[str, dict[str, Any]] = {
    **BODIES,
    RESPONSES: {"model": "fake", "input": "Hi"},
    MESSAGED: {"model": "fake", "max_tokens": 9, "messages": [SAID]},
    COUNTED: {"model": "fake", "messages": [SAID]},
    SELECTION: {"model": "fake", "prompt": "Hi"},
    DOCUMENTS: {"text": "Hi"},
    OLLAMA_CHAT: {"model": "fake", "messages": [SAID], "stream": False},
    OLLAMA_GENERATE: {"model": "fake", "prompt": "Hi", "stream": False},
    "/api/show": {"model": "fake"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [50]},
}
STREAMED = (COMPLETIONS, CHAT, RESPONSES, MESSAGED, OLLAMA_CHAT, OLLAMA_GENERATE)
ANSWERED = (*STREAMED, SELECTION)
BOOM = MemoryError("boom")


BLOCK = {"type": "document", "source": {"type": "file", "file_id": UNKNOWN}}


def content_of(part: dict[str, Any]) -> dict[str, Any]:
    """A message of one part."""
    return {"role": "user", "content": [part]}


async def described(api: Api, **headers: str) -> Described:
    return Described((await api.client.get("/openapi.json", headers=headers)).json())


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
    assert statuses == {"200", "400", "403", "404", "413", "500", "503"}
    assert "securitySchemes" not in document["components"]
    assert "HTTPValidationError" not in json.dumps(document)


async def test_keys_and_quotas_are_described_where_there_are_some(
    tokenizer: Any, tmp_path: Path
) -> None:
    keys = replace_file(tmp_path / "keys", "sk-a")
    key = {"Authorization": "Bearer sk-a"}
    async with api_over(
        FakeCore(), tokenizer, api_key_file=keys, requests_per_minute=len(GOOD)
    ) as api:
        document = await described(api, **key)
        for path in ("/health", "/ping", "/ready", "/version", "/metrics"):
            assert "security" not in document.operation("GET", path)
            document.check(await api.client.get(path))
        for path in ("/tokenizer_info", "/v1/models", "/v1/adapters", "/server_info", "/api/tags"):
            assert document.operation("GET", path)["security"]
            document.check(await api.client.get(path))
        for status in (401, 200, 429):
            for path, body in GOOD.items():
                headers = {} if status == 401 else key
                reply = await api.client.post(path, json=body, headers=headers)
                assert reply.status_code == status
                document.check(reply)


@pytest.mark.parametrize("path", GOOD)
async def test_errors_are_as_described(tokenizer: Any, path: str) -> None:
    async with api_over(FakeCore(), tokenizer, max_body_bytes=1000) as api:
        document = await described(api)
        for status, content in (
            (400, b"{"),
            (400, b'{"model": 3}'),
            (404, json.dumps({**GOOD[path], "model": "other"}).encode()),
            (413, b" " * 1001),
        ):
            reply = await api.client.post(path, content=content)
            assert reply.status_code == status
            document.check(reply)
            if status == 400:
                assert not document.accepts(path, {"model": 3})


@pytest.mark.parametrize("path", ANSWERED)
async def test_failures_are_as_described(api: Api, path: str) -> None:
    document = await described(api)
    aborted = Finished(reason="abort", completion_tokens=0)
    for script, status in (((BOOM,), 500), ((FILTERED, aborted), 503)):
        api.core.script = script
        reply = await api.client.post(path, json=GOOD[path])
        if path != SELECTION or script == (BOOM,):
            assert reply.status_code == status
        document.check(reply)


@pytest.mark.parametrize("path", STREAMED)
async def test_failures_in_streams_are_as_described(api: Api, path: str) -> None:
    document = await described(api)
    for script in ((BOOM,), (FILTERED, "a", BOOM)):
        api.core.script = script
        reply = await api.client.post(path, json={**GOOD[path], "stream": True})
        assert reply.status_code == 200
        assert "boom" in reply.text
        document.check(reply)


async def test_a_full_queue_a_dead_engine_and_a_stopping_one_are_as_described(
    tokenizer: Any,
) -> None:
    async with api_over(FakeCore(), tokenizer, max_queue=0) as api:
        document = await described(api)
        for path in ANSWERED:
            reply = await api.client.post(path, json=GOOD[path])
            assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
            document.check(reply)
    async with api_over(FakeCore(SystemExit("device lost")), tokenizer) as api:
        await api.post(COMPLETIONS)
        for path in ANSWERED:
            reply = await api.client.post(path, json=GOOD[path])
            assert reply.status_code == 503
            document.check(reply)
        for path in ("/health", "/ready"):
            reply = await api.client.get(path)
            assert reply.json()["status"] == "dead"
            document.check(reply)
    async with api_over(FakeCore(), tokenizer) as api:
        api.serving.engine.drain(1)
        reply = await api.client.get("/ready")
        assert reply.json()["status"] == "shutting down"
        document.check(reply)


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
        (RESPONSES, {"input": [content_of({"type": "input_file", "file_id": UNKNOWN})]}),
        *((path, {"messages": [content_of(BLOCK)]}) for path in (MESSAGED, COUNTED)),
    ],
)
async def test_an_unknown_document_is_not_found_as_described(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    document = await described(api)
    body = {**GOOD[path], **fields}
    assert document.accepts(path, body)
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 404
    assert f"={UNKNOWN!r}: no such document" in reply.json()["error"]["message"]
    document.check(reply)


async def test_another_model_is_not_found_as_described(api: Api) -> None:
    document = await described(api)
    document.check(await api.client.get("/v1/models/other"), "/v1/models/{name}")


@pytest.mark.parametrize("path", STREAMED)
async def test_every_integer_may_be_written_with_a_point(api: Api, path: str) -> None:
    """As JSON schema has it; pydantic's strict integers refuse 1.0."""
    document = await described(api)
    content = document.operation("POST", path)["requestBody"]["content"]["application/json"]
    body = document.document["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]
    integers = {
        field: float(kind.get("minimum", 0) or kind.get("maximum", 0))
        for form in body.get("anyOf", [body])
        for field, schema in form["properties"].items()
        for kind in schema.get("anyOf", [schema])
        if kind.get("type") == "integer"
    }
    assert integers
    for field, value in integers.items():
        reply = await api.client.post(path, json={**GOOD[path], field: value})
        assert "valid integer" not in reply.text, field


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
    *((CHAT, {"messages": [{"role": role}]}, False) for role in ("user", "system", "tool")),
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
    body = {**GOOD[path], **fields}
    api.core.script = (FILTERED,)
    reply = await api.client.post(path, json=body)
    assert reply.status_code == (200 if is_good else 400), reply.text
    assert (await described(api)).accepts(path, body) == is_good
