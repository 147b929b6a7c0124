"""ASGI middleware: what all requests hold until their replies have been sent has a limit."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.access.held_bytes import HeldBytes
from gemserve.errors import LogprobsFull, ReplyMemoryFull, RequestError
from gemserve.holdings import Holdings

LOGPROB_BYTES = 512  # of one, from when it is drawn until the reply is sent


class HeldLogprobs:
    """What one request takes of the memory for log-probabilities."""

    in_state = "logprobs"  # where a route finds it in the request's state

    def __init__(self, held: HeldBytes, memory: Holdings) -> None:
        self._held = held
        self._memory = memory

    def take(self, count: int) -> None:
        """Take memory for so many. Raises `LogprobsFull` if there is too little left."""
        if not self._held.grow(count * LOGPROB_BYTES):
            raise LogprobsFull(
                count * LOGPROB_BYTES, used=self._memory.used, limit=self._memory.capacity
            )


class HeldReply:
    """What one request's reply takes of the memory for large replies, in bytes.

    What streams while it is drawn need not be counted, because its reader's pace bounds it.
    """

    in_state = "reply"  # where a route finds it in the request's state

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


class ReplyMemory:
    """Bounds what all requests hold of one kind, each until its reply has been sent."""

    def __init__(
        self, app: ASGIApp, kind: type[HeldLogprobs] | type[HeldReply], memory_bytes: int
    ) -> None:
        self._app = app
        self._kind = kind
        self._memory = Holdings(memory_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        caller = state.get("caller")
        held = HeldBytes(self._memory, b"" if caller is None else caller.key)
        state[self._kind.in_state] = self._kind(held, self._memory)
        try:
            await self._app(scope, receive, send)
        finally:
            held.release()
