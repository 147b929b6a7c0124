"""No page reaches a keyless server by a name of its own, which it lets lead to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import COMPLETIONS, FakeCore, api_over, replace_file, serving_over
from tests.served import Served, served

pytestmark = pytest.mark.anyio


def status_for(server: Served, host: str | None, path: str, headers: dict[str, str]) -> int:
    lines = [f"GET {path} HTTP/1.{0 if host is None else 1}", "Connection: close"]
    lines += [] if host is None else [f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with server.connect() as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.recv(65536).split()[1])


HERE = ["localhost", "LOCALHOST:80", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "localhost:", None]
ELSEWHERE = [
    "evil.example",
    "localhost.evil.example:8000",
    "127.0.0.1.evil.example",
    "evil.example:80:80",
    "10.0.0.1",
    "0.0.0.0",
    "[::2]",
    "localhost@evil.example",
]


def test_a_page_cannot_reach_a_keyless_server_by_its_own_name(tokenizer: Any) -> None:
    """DNS rebinding: the page's name leads to 127.0.0.1, and the browser shows it the replies."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        for path in ("/v1/models", "/metrics", "/"):
            assert {status_for(server, host, path, {}) for host in HERE} == {200}
            assert {status_for(server, host, path, {}) for host in ELSEWHERE} == {403}
        headers = {"Host": "evil.example:8000"}
        reply = server.post(COMPLETIONS, headers=headers, prompt="Hi")
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (403, "host_not_allowed")
        assert "Host='evil.example:8000'" in error["message"]
        assert "--allowed-host" in error["message"]
        assert reply.headers["x-request-id"]
        assert server.metrics()['admission_rejections_total{reason="host_not_allowed"}'] > 0


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({"allowed_hosts": ("Gem.Example.org", "[2001:db8::1]")}, "gem.example.ORG:80", "gem"),
        ({"allowed_hosts": ("gem", "[2001:db8::1]")}, "[2001:DB8::1]:80", "[2001:db8::2]"),
        ({"allowed_hosts": ("*",)}, "evil.example", None),
        ({"api_key_file": True}, "gem.example.org", None),
        ({"api_key_file": True, "allowed_hosts": ("gem",)}, "gem:1", "evil.example"),
        ({"host": "0.0.0.0"}, "gem.example.org", None),
        ({"host": "0.0.0.0", "allowed_hosts": ("gem",)}, "gem", "10.0.0.1"),
        ({"host": "::1"}, "[::1]", "evil.example"),
        ({"host": "localhost"}, "localhost", "evil.example"),
    ],
)
async def test_hosts_are_checked_where_nothing_else_protects_or_where_they_are_named(
    tokenizer: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    allowed: str,
    refused: str | None,
) -> None:
    """A server with keys, or one that others shall reach, goes by names that it cannot know."""
    if "api_key_file" in settings:
        settings = {**settings, "api_key_file": replace_file(tmp_path / "keys", "alice")}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        for host, status in ((allowed, 200), (refused, 403)):
            if host is not None:
                reply = await api.client.get(
                    "/v1/models", headers={"Authorization": "Bearer alice", "Host": host}
                )
                assert reply.status_code == status
