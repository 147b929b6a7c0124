"""Pages of other origins: none by default, else those that are named, and never with cookies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import CHAT, Api, FakeCore, api_over, live_server, serving_over

pytestmark = pytest.mark.anyio
HOME, OTHER = "https://app.example", "https://evil.example"
ALLOW = "access-control-allow-origin"


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("alice")
    return str(path)


@pytest.fixture
async def named(tokenizer: Any, key_file: str) -> AsyncIterator[Api]:
    settings = {
        "cors_origins": (HOME, "http://localhost:3000"),
        "api_key_file": key_file,
        "requests_per_minute": 1,
        "max_body_bytes": 1000,
    }
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        yield api


async def test_off_by_default(api: Api) -> None:
    reply = await api.client.options(CHAT, headers=preflight(HOME))
    assert reply.status_code == 405
    reply = await api.post(CHAT, headers={"Origin": HOME})
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_options_of_the_whole_server_and_of_no_path(tokenizer: Any) -> None:
    serving = serving_over(FakeCore(), tokenizer)
    with live_server(serving) as url, closing(HTTPConnection(url.removeprefix("http://"))) as sent:
        answers = {}
        for path in ("*", "/nothing", "/api/nothing", "/v1/models"):
            sent.request("OPTIONS", path)
            reply = sent.getresponse()
            answers[path] = (reply.status, reply.getheader("Allow"), reply.read())
    assert answers["*"] == (204, "DELETE, GET, HEAD, POST", b"")
    for path in ("/nothing", "/api/nothing"):
        assert answers[path][:2] == (404, None)
        assert f"{path}: this server does not serve this path".encode() in answers[path][2]
    assert answers["/v1/models"][:2] == (405, "GET, HEAD")


@pytest.mark.parametrize("origin", [HOME, "http://localhost:3000"])
async def test_a_preflight_needs_no_key_and_counts_for_nothing(named: Api, origin: str) -> None:
    for _ in range(3):
        reply = await named.client.options(CHAT, headers=preflight(origin))
        assert (reply.status_code, reply.headers[ALLOW]) == (200, origin)
        assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reply.headers
        assert reply.headers["x-request-id"]
    good = {"Origin": origin, "Authorization": "Bearer alice"}
    assert (await named.post(CHAT, headers=good)).status_code == 200


async def test_a_page_of_a_public_address_may_call_a_server_in_a_private_network(
    named: Api,
) -> None:
    """Chromium asks before it lets https://app.example call http://192.168.0.2."""
    asked = "Access-Control-Request-Private-Network"
    answer = asked.replace("Request", "Allow")
    reply = await named.client.options(CHAT, headers={**preflight(HOME), asked: "true"})
    assert (reply.status_code, reply.headers[answer]) == (200, "true")
    assert answer not in (await named.client.options(CHAT, headers=preflight(HOME))).headers
    reply = await named.client.options(CHAT, headers={**preflight(OTHER), asked: "true"})
    assert (reply.status_code, reply.headers.get(ALLOW)) == (400, None)


@pytest.mark.parametrize(
    "origin", [OTHER, "http://app.example", f"{HOME}:444", f"{HOME}.evil.example", "null", "", "é"]
)
async def test_other_origins_are_not_let_in(named: Api, origin: str) -> None:
    headers = {k.encode(): v.encode() for k, v in preflight(origin).items()}
    reply = await named.client.options(CHAT, headers=headers)
    assert reply.status_code == 400
    assert ALLOW not in reply.headers
    reply = await named.client.get("/health", headers={b"Origin": origin.encode()})
    assert ALLOW not in reply.headers


async def test_a_page_may_read_refusals(named: Api) -> None:
    home = {"Origin": HOME}
    key = {"Authorization": "Bearer alice"}
    replies = [
        await named.post(CHAT, headers=home),
        await named.post(CHAT, headers={**home, **key}, user="x" * 2000),
        await named.post(CHAT, headers={**home, **key}),
    ]
    assert [r.status_code for r in replies] == [401, 413, 429]
    for reply in replies:
        assert reply.headers[ALLOW] == HOME
        assert "Origin" in reply.headers["vary"]
        assert reply.headers["x-request-id"]
        exposed = reply.headers["access-control-expose-headers"]
        assert {"Retry-After", "X-Request-Id"} <= set(exposed.split(", "))


async def test_all_origins_are_let_in_without_credentials(tokenizer: Any) -> None:
    async with api_over(FakeCore(), tokenizer, cors_origins=("*",)) as api:
        for reply in (
            await api.client.options(CHAT, headers=preflight(OTHER)),
            await api.post(CHAT, headers={"Origin": OTHER, "Cookie": "a=b"}),
        ):
            assert (reply.status_code, reply.headers[ALLOW]) == (200, "*")
            assert "access-control-allow-credentials" not in reply.headers
        reply = await api.client.options(CHAT, headers=preflight(OTHER, "PUT"))
        assert reply.status_code == 400


async def test_a_request_without_an_origin_is_served(named: Api) -> None:
    reply = await named.post(CHAT, headers={"Authorization": "Bearer alice"})
    assert (reply.status_code, ALLOW in reply.headers) == (200, False)
