"""How the ingress calls replicas through Ray Serve's handles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the packages of gemserve[ray]")

from ray.serve import context

from gemserve_fleet.replicas.messages import RelayedRequest, RequestBody
from gemserve_fleet.replicas.ray_replicas import RayReplicas
from gemserve_fleet.replicas.replica_choice import RoutingHints
from gemserve_fleet.replicas.router_link import ROUTER_LINK

pytestmark = pytest.mark.anyio
NAMES = ("r0", "r1")


class Reply:
    """What a handle returns: awaited for a call, iterated for a stream."""

    def __await__(self) -> Any:
        return asyncio.sleep(0).__await__()

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> list[Any]:
        return []

    def cancel(self) -> None:
        pass


class Handle:
    """Notes of which request of Ray each call would be a part."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Reply:
        self.requests.append(context._get_serve_request_context()._internal_request_id)
        return Reply()


async def test_calls_of_one_http_request_are_requests_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one id Ray sends only one of them, and /metrics lacked a replica in most scrapes."""
    monkeypatch.setattr(ROUTER_LINK, "names", lambda: NAMES)
    handle: Any = Handle()
    replicas = RayReplicas(handle)
    held = context._RequestContext(_internal_request_id="of the HTTP request")
    token = context._serve_request_context.set(held)
    try:
        await asyncio.gather(*(replicas.call(name, "answer_whole") for name in NAMES))
        request = RelayedRequest(number="1", scope={}, body=RequestBody(), caller=None)
        answers = replicas.answer(RoutingHints(), request)
        await anext(answers)
        await answers.aclose()
        assert context._get_serve_request_context() is held
    finally:
        context._serve_request_context.reset(token)
    assert handle.requests == ["", "", ""]
