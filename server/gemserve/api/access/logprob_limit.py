"""ASGI middleware: the log-probabilities of all requests share a memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.access.held_bytes import HeldBytes
from gemserve.errors import LogprobsFull
from gemserve.holdings import Holdings

LOGPROB_BYTES = 512  # of one, from when it is drawn until the reply is sent


class LogprobLimit:
    """Bounds what each request may hold beside the others, until its reply has been sent.

    A route finds its `HeldLogprobs` in the request's state.
    """

    def __init__(self, app: ASGIApp, memory_bytes: int) -> None:
        self._app = app
        self._memory = Holdings(memory_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = state.get("caller")
        held = HeldBytes(self._memory, b"" if caller is None else caller.key)
        state["logprobs"] = HeldLogprobs(held, self._memory)
        try:
            await self._app(scope, receive, send)
        finally:
            held.release()


class HeldLogprobs:
    """What one request takes of the memory for log-probabilities."""

    def __init__(self, held: HeldBytes, memory: Holdings) -> None:
        self._held = held
        self._memory = memory

    def take(self, count: int) -> None:
        """Take memory for so many. Raises `LogprobsFull` if there is too little left."""
        if not self._held.grow(count * LOGPROB_BYTES):
            raise LogprobsFull(
                count * LOGPROB_BYTES, used=self._memory.used, limit=self._memory.capacity
            )
