"""Requests about adapters, and with them, to a server whose core is scripted."""

from __future__ import annotations

import sys
from typing import Any

import httpx

from tests.fakes import (
    CHAT,
    COMPLETIONS,
    Api,
    wait_for_async,
)

ADAPTERS, RESPONSES, SELECTION = "/v1/adapters", "/v1/responses", "/v1/filter"
MIB = 1 << 20
PREFIX = 7  # positions of the prefixes that tests make
REQUESTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    SELECTION: {"prompt": "Hi"},
}


async def load(api: Api, name: object = "p", path: object = "good", **more: Any) -> httpx.Response:
    return await api.client.post(ADAPTERS, json={"name": name, "path": path}, **more)


async def listed(api: Api) -> dict[str, dict[str, Any]]:
    reply = (await api.client.get(ADAPTERS)).json()
    assert reply["object"] == "list"
    return {entry["name"]: entry for entry in reply["data"]}


async def ask(api: Api, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return await api.client.post(path, json={"model": "fake", **REQUESTS[path], **fields})


def check_error(reply: httpx.Response, status: int, param: str | None, code: str) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert len(reply.content) < 2048
    return str(error["message"])


async def freed(api: Api) -> None:
    """Until nothing holds the requests that were answered, as the fake core does for its tests."""
    requests = api.core.requests.copy()
    api.core.requests.clear()
    here = 3  # the list, the variable, the argument
    await wait_for_async(lambda: all(sys.getrefcount(request) == here for request in requests))
