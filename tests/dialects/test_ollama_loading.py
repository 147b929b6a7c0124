"""A request to Ollama's endpoints without a prompt loads the model or unloads it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Api

pytestmark = pytest.mark.anyio
EMPTY: list[tuple[str, dict[str, Any]]] = [
    ("/api/generate", {}),
    ("/api/generate", {"prompt": ""}),
    ("/api/generate", {"prompt": None}),
    ("/api/generate", {"prompt": "", "system": "Be brief."}),
    ("/api/generate", {"prompt": "", "stream": False}),
    ("/api/chat", {}),
    ("/api/chat", {"messages": []}),
    ("/api/chat", {"messages": None}),
    ("/api/chat", {"messages": [], "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), EMPTY)
@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (None, "load"),
        ("5m", "load"),
        (-1, "load"),
        (0, "unload"),
        ("0", "unload"),
        ("0s", "unload"),
        ("0h0m0s", "unload"),
        ("0.0", "unload"),
        ("-0ms", "unload"),
        (0.0, "unload"),
        ("10m", "load"),
        ("0h0m1s", "load"),
    ],
)
async def test_a_request_without_a_prompt_is_confirmed(
    api: Api, path: str, body: dict[str, Any], kept: object, reason: str
) -> None:
    more = {} if kept is None else {"keep_alive": kept}
    reply = await api.client.post(path, json={"model": "fake", **body, **more})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert api.core.requests == []
    said = reply.json()
    assert (said["model"], said["done"], said["done_reason"]) == ("fake", True, reason)
    if path == "/api/chat":
        assert said["message"] == {"role": "assistant", "content": ""}
    else:
        assert said["response"] == ""


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_a_model_that_is_not_served_is_not_loaded(api: Api, path: str) -> None:
    reply = await api.client.post(path, json={"model": "llama3.2"})
    assert reply.status_code == 404
    assert "llama3.2" in reply.json()["error"]
