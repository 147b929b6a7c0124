"""No field of a request makes the server connect to another, or open a file that it names."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, Api

pytestmark = pytest.mark.anyio
RESPONSES, MESSAGES, DOCUMENTS = "/v1/responses", "/v1/messages", "/v1/documents"
PLACES = ("http://127.0.0.1:9/x", "file:///etc/passwd", "../../../etc/passwd", "/etc/passwd")


def bodies(place: str) -> list[tuple[str, dict[str, Any]]]:
    def said(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part]}]

    source = {"type": "url", "url": place}
    mcp = {"type": "mcp", "server_label": "x", "server_url": place}
    return [
        (CHAT, {"messages": said({"type": "image_url", "image_url": {"url": place}})}),
        (CHAT, {"messages": said({"type": "file", "file": {"file_id": place}})}),
        (CHAT, {"messages": said({"type": "file", "file": {"file_data": place}})}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "model": place}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "adapter": place}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "chat_template": place}),
        (COMPLETIONS, {"prompt": "x", "model": f"fake:{place}"}),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"$ref": place}}}}),
        (RESPONSES, {"input": said({"type": "input_image", "image_url": place})}),
        (RESPONSES, {"input": said({"type": "input_file", "file_url": place})}),
        (RESPONSES, {"input": "x", "tools": [mcp]}),
        (RESPONSES, {"input": "x", "previous_response_id": place}),
        (MESSAGES, {"messages": said({"type": "image", "source": source}), "max_tokens": 1}),
        (MESSAGES, {"messages": said({"type": "document", "source": source}), "max_tokens": 1}),
        (MESSAGES, {"messages": said({"type": "text", "text": "x"}), "max_tokens": 1,
                    "mcp_servers": [{"type": "url", "url": place, "name": "x"}]}),
        (DOCUMENTS, {"url": place}),
        ("/v1/adapters", {"name": "x", "path": place}),
    ]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
async def test_an_address_in_any_field_is_refused(
    api: Api, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[object] = []

    def connect(_: socket.socket, address: object) -> None:
        connected.append(address)
        raise OSError("this test allows no connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: connect(None, names))  # type: ignore[arg-type]
    for path, fields in bodies(place):
        reply = await api.client.post(path, json={"model": "fake", **fields})
        assert reply.status_code in (400, 403, 404), (path, fields, reply.text)
        assert "root:" not in reply.text
    assert connected == []
    assert api.core.requests == []


async def test_an_address_in_a_text_is_text(api: Api) -> None:
    reply = await api.client.post(DOCUMENTS, json={"text": PLACES[0], "name": PLACES[2]})
    assert reply.status_code == 200
    assert json.loads(reply.text)["bytes"] == len(PLACES[0])
