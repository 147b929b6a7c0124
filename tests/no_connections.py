"""Requests that name a place elsewhere, at a server that must not look there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes import Api

PLACES = ("http://127.0.0.1:9/x", "file:///etc/passwd", "../../../etc/passwd", "/etc/passwd")


def said(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A user's message of one part."""
    return [{"role": "user", "content": [part]}]


async def check_nothing_is_fetched(
    api: Api, bodies: Sequence[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of `bodies`, a path with fields, is refused without a connection and without a file."""
    connected: list[object] = []

    def connect(_: socket.socket, address: object) -> None:
        connected.append(address)
        raise OSError("this test allows no connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: connect(None, names))  # type: ignore[arg-type]
    for path, fields in bodies:
        reply = await api.client.post(path, json={"model": "fake", **fields})
        assert reply.status_code in (400, 403, 404), (path, fields, reply.text)
        assert "root:" not in reply.text
    assert connected == []
    assert api.core.requests == []
