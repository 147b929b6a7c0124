"""`/ping`, `/load`, `/server_info` and `/props`, and HEAD wherever GET is."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.routes.server_state import LEFT_OUT
from gemserve.config import EngineConfig, ServerConfig
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    live_server,
    replace_file,
    serving_over,
    wait_for_async,
)

pytestmark = pytest.mark.anyio


async def test_ping(api: Api, tokenizer: Any) -> None:
    for method in ("GET", "POST", "HEAD"):
        reply = await api.client.request(method, "/ping")
        assert (reply.status_code, reply.content) == (200, b"")
    async with api_over(FakeCore(SystemExit("device lost")), tokenizer) as dead:
        await dead.post(COMPLETIONS)
        for method in ("GET", "POST"):
            reply = await dead.client.request(method, "/ping")
            assert (reply.status_code, reply.json()["status"]) == (503, "dead")


async def test_load_counts_what_waits_and_runs(tokenizer: Any) -> None:
    gate = threading.Event()
    async with api_over(FakeCore(FILTERED, gate, "a"), tokenizer) as api:

        async def load() -> int:
            count: int = (await api.client.get("/load")).json()["server_load"]
            return count

        assert await load() == 0
        request = asyncio.create_task(api.post(COMPLETIONS, n=2))
        await wait_for_async(lambda: len(api.core.requests) == 1)
        assert await load() == 2
        gate.set()
        await request
        await wait_for_async(lambda: api.serving.engine.num_running == 0)
        assert await load() == 0


async def test_props(api: Api) -> None:
    props = (await api.client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 2000
    assert props["total_slots"] == EngineConfig().max_running
    assert (props["model_path"], props["eos_token"]) == (
        "fake",
        api.serving.builder.tokenizer.eos_token,
    )
    assert props["chat_template"] == api.serving.builder.tokenizer.chat_template
    assert props["modalities"] == {"vision": False, "audio": False}


async def test_server_info_names_no_file_and_no_key(tokenizer: Any, tmp_path: Path) -> None:
    keys = replace_file(tmp_path / "secret-keys", "sk-secret")
    adapters = tmp_path / "secret-adapters"
    adapters.mkdir()
    async with api_over(
        FakeCore(),
        tokenizer,
        api_key_file=keys,
        admin_key_file=keys,
        adapter_dir=str(adapters),
        allowed_hosts=("secret.example",),
        cors_origins=("https://secret.example",),
        requests_per_minute=7,
    ) as api:
        assert (await api.client.get("/server_info")).status_code == 401
        headers = {"Authorization": "Bearer sk-secret"}
        reply = await api.client.get("/server_info", headers=headers)
        info = reply.json()
        assert "secret" not in reply.text
        assert str(tmp_path) not in reply.text
    assert info["needs_key"] is True
    assert info["has_libraries"] is False
    assert (info["model"], info["max_model_len"]) == ("fake", 2000)
    assert info["server"]["requests_per_minute"] == 7
    assert info["engine"]["filter_method"] == "sieve"


def test_no_other_setting_is_a_text_that_may_be_a_place() -> None:
    """A new setting must be thought about before `/server_info` shows it."""
    texts = {
        field.name
        for config in (EngineConfig, ServerConfig)
        for field in fields(config)
        if "str" in str(field.type).replace("Literal", "")
    }
    assert texts <= LEFT_OUT
    known = {field.name for config in (EngineConfig, ServerConfig) for field in fields(config)}
    assert known >= LEFT_OUT


async def test_head_is_get_without_a_body(api: Api) -> None:
    document = (await api.client.get("/openapi.json")).json()
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    for path in [*(p.replace("{name}", "fake") for p in paths), "/", "/openapi.json", "/nowhere"]:
        gotten, headed = await api.client.get(path), await api.client.head(path)
        assert headed.status_code == gotten.status_code, path
        assert headed.content == b""
        if path != "/metrics":  # which counts replies
            for name in ("content-type", "content-length"):
                assert headed.headers[name] == gotten.headers[name], path


def test_head_leaves_the_connection_in_order(core: FakeCore, tokenizer: Any) -> None:
    """A body after HEAD would be read as the next reply."""
    with live_server(serving_over(core, tokenizer)) as url, httpx.Client(base_url=url) as client:
        for path in ("/health", "/v1/models", "/nowhere", "/"):
            gotten, headed = client.get(path), client.head(path)
            assert headed.status_code == gotten.status_code
            assert headed.headers["content-length"] == gotten.headers["content-length"]
            assert client.get("/health").json() == {"status": "ok"}


async def test_a_wrong_method_does_not_write_the_document(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes some 0.2 s of the event loop, and anybody may send such a request."""
    written: list[str] = []
    monkeypatch.setattr("gemserve.api.app.write_document", lambda *_: written.append("") or {})
    assert (await api.client.put("/health")).status_code == 405
    assert not written


async def test_head_is_allowed_where_get_is(api: Api) -> None:
    for path, allowed in (
        ("/health", "GET, HEAD"),
        ("/ping", "GET, HEAD, POST"),
        ("/v1/documents", "GET, HEAD, POST"),
        ("/v1/documents/doc-1", "DELETE, GET, HEAD"),
        (CHAT, "POST"),
    ):
        reply = await api.client.put(path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert (await api.client.head(CHAT)).status_code == 405


async def test_head_needs_a_key_too(tokenizer: Any, tmp_path: Path) -> None:
    keys = replace_file(tmp_path / "keys", "sk-a")
    async with api_over(FakeCore(), tokenizer, api_key_file=keys) as api:
        assert (await api.client.head("/health")).status_code == 200
        assert (await api.client.head("/ping")).status_code == 200
        for path in ("/v1/models", "/load", "/props", "/server_info", "/nowhere"):
            assert (await api.client.head(path)).status_code == 401


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/completion", "llama.cpp's own completions"),
        ("/slots", "/load"),
        ("/infill", "infilling"),
        ("/v1/embeddings", "embeddings"),
        ("/pooling", "embeddings"),
        ("/chat/completions", "without /v1"),
    ],
)
async def test_paths_of_other_servers_are_explained(api: Api, path: str, said: str) -> None:
    for method in ("GET", "POST"):
        reply = await api.client.request(method, path)
        assert reply.status_code == 404
        message = reply.json()["error"]["message"]
        assert said in message
        assert "/v1/chat/completions" in message
    assert json.loads(reply.text)["error"]["type"] == "invalid_request_error"
