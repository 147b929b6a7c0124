"""API keys over HTTP: who is let in, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.access import keys
from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    hash_of,
    replace_file,
    text_of,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
ALICE, BOB, ADMIN = "sk-alice-0123", "sk-bob-4567", "sk-admin-89ab"
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    replace_file(path, ALICE, f"sha256:{hash_of(BOB).hex()}")
    return path


@pytest.fixture
async def guarded(tokenizer: Any, key_file: Path) -> AsyncIterator[Api]:
    admin_file = replace_file(key_file.with_name("admins"), ADMIN)
    async with api_over(
        FakeCore(), tokenizer, api_key_file=str(key_file), admin_key_file=admin_file
    ) as api:
        yield api


async def ask(api: Api, *authorizations: str | bytes, path: str = CHAT) -> httpx.Response:
    """A good request with these `Authorization` headers."""
    values = [a.encode() if isinstance(a, str) else a for a in authorizations]
    headers = [(b"Authorization", value) for value in values]
    return await api.client.post(path, content=json.dumps(BODIES[path]), headers=headers)


def assert_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 401
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]
    assert len(reply.content) < 500


@both
@pytest.mark.parametrize("key", [ALICE, BOB, ADMIN])
async def test_every_valid_key_is_let_in(guarded: Api, path: str, key: str) -> None:
    assert (await ask(guarded, f"Bearer {key}", path=path)).status_code == 200
    models = await guarded.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert models.status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "bEaReR    ", "  Bearer "])
async def test_the_scheme_s_case_and_spaces_do_not_matter(guarded: Api, scheme: str) -> None:
    assert (await ask(guarded, f"{scheme}{ALICE} ")).status_code == 200


WRONG: list[list[str | bytes]] = [
    [],
    [""],
    ["Bearer"],
    ["Bearer "],
    [ALICE],
    ["Bearer wrong"],
    [f"Bearer {ALICE[:-1]}"],
    [f"Bearer {ALICE}x"],
    [f"Bearer {ALICE.upper()}"],
    [f"Bearer\t{ALICE}"],
    [f"Bearer {ALICE} {ALICE}"],
    [f"Bearer {ALICE}, Bearer {BOB}"],
    [f"Basic {ALICE}"],
    [f"Bearer sha256:{hash_of(BOB).hex()}"],  # who has read the file has no key
    [f"Bearer {hash_of(BOB).hex()}"],
    ["Bearer schlüssel"],
    [b"Bearer \xff\xfe\x00"],
    [b"\xff" * 1000],
    ["Bearer " + "x" * 1_000_000],
    ["Bearer" + " " * 1_000_000],
    [f"Bearer {ALICE}", f"Bearer {ALICE}"],
    [f"Bearer {ALICE}", "Bearer wrong"],
    ["Bearer wrong", f"Bearer {ALICE}"],
    [f"Bearer {ALICE}"] * 1000,
]


@pytest.mark.parametrize("authorizations", WRONG, ids=lambda v: ascii(v)[:40])
async def test_whoever_has_no_key_is_refused(
    guarded: Api, authorizations: list[str | bytes]
) -> None:
    assert_refused(await ask(guarded, *authorizations))
    assert guarded.core.requests == []
    assert (await ask(guarded, f"Bearer {ALICE}")).status_code == 200
    refused = (await guarded.metrics())['admission_rejections_total{reason="invalid_api_key"}']
    assert refused == 1


@pytest.mark.parametrize(
    ("sent", "is_let_in"),
    [
        ([("x-api-key", ALICE)], True),
        ([("X-API-Key", f" {BOB} ")], True),
        ([("x-api-key", ALICE), ("Authorization", f"Bearer {ALICE}")], True),
        ([("x-api-key", "another gateway's"), ("Authorization", f"Bearer {BOB}")], True),
        ([("x-api-key", ALICE), ("Authorization", "Bearer wrong")], False),
        ([("x-api-key", ALICE), ("x-api-key", ALICE)], False),
        ([("x-api-key", f"Bearer {ALICE}")], False),
        ([("x-api-key", "")], False),
        ([("x-api-key", "wrong")], False),
    ],
)
async def test_anthropic_s_header_holds_a_key_too(
    guarded: Api, sent: list[tuple[str, str]], is_let_in: bool
) -> None:
    reply = await guarded.client.post(CHAT, content=json.dumps(BODIES[CHAT]), headers=sent)
    if is_let_in:
        assert reply.status_code == 200
    else:
        assert_refused(reply)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake"),
        ("GET", CHAT),
        ("DELETE", "/v1/models/fake"),
        ("OPTIONS", CHAT),
        ("POST", "/v1/nowhere"),
        ("GET", "/nowhere"),
        ("GET", "/openapi.json"),
        ("GET", "/health/../v1/models"),
        ("GET", "/v1/models?path=/health"),
        ("GET", "/%76%31/models"),
    ],
)
async def test_all_but_the_probes_need_a_key(guarded: Api, method: str, path: str) -> None:
    assert_refused(await guarded.client.request(method, path))


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
async def test_the_probes_stay_open(guarded: Api, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert (await guarded.client.get(path, headers=headers)).status_code == 200


@both
async def test_a_server_without_keys_ignores_them(api: Api, path: str) -> None:
    for values in ([], ["Bearer x"], [b"\xff"], ["Basic x", "Bearer y"]):
        assert (await ask(api, *values, path=path)).status_code == 200


@both
async def test_no_body_is_read_before_the_key(guarded: Api, path: str) -> None:
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 1000

    assert_refused(await guarded.client.post(path, content=pieces()))
    assert num_sent == 0


async def test_the_body_limit_holds_for_those_let_in(tokenizer: Any, key_file: Path) -> None:
    settings = {"api_key_file": str(key_file), "max_body_bytes": 1000}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        big = "x" * 2000
        assert_refused(await api.client.post(CHAT, content=big))
        headers = {"Authorization": f"Bearer {ALICE}"}
        assert (await api.client.post(CHAT, content=big, headers=headers)).status_code == 413


async def test_a_refusal_has_the_client_s_request_id(guarded: Api) -> None:
    reply = await guarded.post(CHAT, headers={"X-Request-Id": "mine"})
    assert_refused(reply)
    assert reply.headers.get_list("x-request-id") == ["mine"]
    reply = await guarded.post(CHAT, headers={"X-Request-Id": "x" * 129})
    assert_refused(reply)
    assert len(reply.headers["x-request-id"]) <= 128


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key files are looked at on every request."""
    monkeypatch.setattr(keys, "RECHECK_S", 0.0)


@pytest.mark.usefixtures("_impatient")
async def test_keys_come_and_go_with_the_file(guarded: Api, key_file: Path) -> None:
    replace_file(key_file, "sk-carol")
    assert_refused(await ask(guarded, f"Bearer {ALICE}"))
    assert (await ask(guarded, "Bearer sk-carol")).status_code == 200
    replace_file(key_file, "two words")
    assert (await ask(guarded, "Bearer sk-carol")).status_code == 200
    assert_refused(await ask(guarded, f"Bearer {ALICE}"))


@pytest.mark.usefixtures("_impatient")
async def test_a_file_replaced_again_and_again_always_has_its_key(
    guarded: Api, key_file: Path
) -> None:
    is_over = threading.Event()

    def replace() -> None:
        while not is_over.is_set():
            replace_file(key_file, ALICE, BOB)
            replace_file(key_file, ALICE)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(50):
            reply = await guarded.client.get(
                "/v1/models", headers={"Authorization": f"Bearer {ALICE}"}
            )
            assert reply.status_code == 200
    finally:
        is_over.set()
        thread.join()


@pytest.mark.usefixtures("_impatient")
async def test_a_stream_outlives_its_key(tokenizer: Any, key_file: Path) -> None:
    gate = threading.Event()
    core = FakeCore(FILTERED, "before, ", gate, "after")
    settings = {"api_key_file": str(key_file), "concurrency_per_key": 1}
    async with api_over(core, tokenizer, **settings) as api:
        headers = {"Authorization": f"Bearer {ALICE}"}
        streaming = asyncio.create_task(api.post(CHAT, stream=True, headers=headers))
        await wait_for_async(core.started.is_set)
        replace_file(key_file, BOB)
        assert_refused(await ask(api, f"Bearer {ALICE}"))
        gate.set()
        assert text_of(data_of(await streaming)) == "before, after"
        replace_file(key_file, ALICE)  # back again: its place must be free
        assert (await ask(api, f"Bearer {ALICE}")).status_code == 200


@pytest.mark.usefixtures("_impatient")
async def test_no_key_is_ever_shown(
    guarded: Api, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = [ALICE, BOB, ADMIN, "sk-wrong-key", "sk-bad line"]
    shown = ""
    with caplog.at_level(logging.DEBUG):
        for key in secrets:
            for value in (f"Bearer {key}", f"Basic {key}", key):
                reply = await ask(guarded, value)
                shown += reply.text + str(reply.headers)
        replace_file(key_file, ALICE, "sk-bad line")
        guarded.core.script = (FILTERED, MemoryError("boom"))
        shown += (await ask(guarded, f"Bearer {ALICE}")).text
    assert "line 2" in caplog.text
    shown += caplog.text + (await guarded.client.get("/metrics")).text + repr(guarded.serving)
    for secret in secrets:
        assert secret not in shown
        assert hash_of(secret).hex() not in shown
