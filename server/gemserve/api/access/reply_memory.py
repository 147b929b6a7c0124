"""ASGI middleware: the large replies of all requests share a memory, until they have been sent."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.access.held_bytes import HeldBytes
from gemserve.errors import ReplyMemoryFull, RequestError
from gemserve.holdings import Holdings


class ReplyMemory:
    """Bounds the bytes of all replies that are being written or sent.

    A route finds its `HeldReply` in the request's state. What streams while it is drawn need not be
    counted, because its reader's pace bounds it.
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
        state["reply"] = HeldReply(held, self._memory)
        try:
            await self._app(scope, receive, send)
        finally:
            held.release()


class HeldReply:
    """What one request's reply takes of the memory."""

    def __init__(self, held: HeldBytes, memory: Holdings) -> None:
        self._held = held
        self._memory = memory

    def take(self, num_bytes: int, field: str) -> None:
        """Take memory for a reply of so many bytes, before it is written.

        Raises `RequestError`, which names `field`, if no reply may be so large, and
        `ReplyMemoryFull` if there is too little left.
        """
        limit = self._memory.capacity
        if num_bytes > limit:
            raise RequestError(
                f"{field}: the reply may have {num_bytes} bytes, the limit is {limit}",
                param=field,
                code="reply_too_large",
            )
        if not self._held.grow(num_bytes):
            raise ReplyMemoryFull(num_bytes, used=self._memory.used, limit=limit)
