"""ASGI middleware: request bodies have a largest size, a longest time, and share a memory.

A body that its client has compressed is decoded here, within the same limits.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.api.access.content_encoding import ACCEPTED, Decoder, UnknownEncoding, decoder_of
from gemserve.api.access.held_bytes import HeldBytes
from gemserve.api.error_replies import error_body
from gemserve.errors import shown
from gemserve.holdings import Holdings

_OF_ENCODED = (b"content-encoding", b"content-length")  # headers that say how it was sent


class BodyLimit:
    """Refuses bodies, whether or not their length was announced.

    A body of more than `max_bytes`, encoded or decoded, gets 413, one that takes longer than
    `timeout_s` gets 408, and one in an encoding that is not read here 415. All
    bodies that are being read or parsed share `memory_bytes`, or `max_bytes` if that is more; one
    for which nothing is left gets 503, and so does a further body of a key that holds three times
    what is left. A route that no longer needs a body's bytes calls `release`
    of the `HeldBytes` in the request's state.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, *, memory_bytes: int = 1 << 62, timeout_s: float = 3600
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._memory = Holdings(max(memory_bytes, max_bytes))
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._too_large(int(announced))(scope, receive, send)
            return
        try:
            decoder = decoder_of(scope["headers"])
        except UnknownEncoding as error:
            await _not_decoded(str(error))(scope, receive, send)
            return
        if decoder is not None:  # the rest of the server sees the decoded body
            headers = [each for each in scope["headers"] if each[0] not in _OF_ENCODED]
            scope = {**scope, "headers": headers}
        state = scope.setdefault("state", {})
        caller = state.get("caller")
        held = HeldBytes(self._memory, b"" if caller is None else caller.key)
        reading = _Reading(receive, self._timeout_s, self._max_bytes, held, decoder)
        state["body"] = held

        async def send_unless_refused(message: Message) -> None:
            if reading.refusal is None:
                await send(message)

        try:
            await self._app(scope, reading.receive, send_unless_refused)
        except _Refused:
            pass  # answered below
        finally:
            reading.held.release()
        if reading.refusal is not None:
            await self._reply(reading)(scope, receive, send)

    def _reply(self, reading: _Reading) -> Any:
        if reading.refusal == "large":
            return self._too_large(reading.num_bytes)
        if reading.refusal == "broken":
            message = "The body is not what its Content-Encoding says, or it is cut off."
            body = error_body(message, kind="invalid_request_error", code="invalid_encoding")
            return JSONResponse(body, status_code=400)
        if reading.refusal == "slow":
            message = f"The body did not come within {self._timeout_s:g} s, which is the limit."
            body = error_body(message, kind="invalid_request_error", code="request_timeout")
            return JSONResponse(body, status_code=408, headers={"Connection": "close"})
        message = (
            f"The bodies that are being read have {self._memory.capacity} bytes together, which is "
            "the limit."
        )
        body = error_body(message, kind="overloaded_error", code="body_memory_full")
        headers = {"Retry-After": "1", "Connection": "close"}
        return JSONResponse(body, status_code=503, headers=headers)

    def _too_large(self, size: int) -> Any:
        message = (
            f"The body has {size} bytes or more, the limit is {self._max_bytes} (--max-body-bytes)."
        )
        body = error_body(message, kind="invalid_request_error", code="body_too_large")
        return JSONResponse(body, status_code=413)


def _not_decoded(encoding: str) -> JSONResponse:
    message = f"Content-Encoding: {shown(encoding)}: bodies may be encoded as {ACCEPTED}."
    body = error_body(message, kind="invalid_request_error", code="unsupported_encoding")
    return JSONResponse(body, status_code=415, headers={"Accept-Encoding": ACCEPTED})


class _Reading:
    """Receives one request, and refuses its body when a limit is reached."""

    def __init__(
        self,
        receive: Receive,
        timeout_s: float,
        max_bytes: int,
        held: HeldBytes,
        decoder: Decoder | None,
    ) -> None:
        self.held = held
        self.num_bytes = 0
        self.refusal: str | None = None
        self._receive = receive
        self._max_bytes = max_bytes
        self._ends_s = time.monotonic() + timeout_s
        self._is_whole = False
        self._decoder, self._is_all_here = decoder, False

    async def receive(self) -> Message:
        if self._is_whole:  # what comes next is a disconnect, at any time
            return await self._receive()
        message = (
            await self._next() if self._decoder is None else await self._decoded(self._decoder)
        )
        self._is_whole = not message.get("more_body", False)
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self._max_bytes:
            self._refuse("large")
        if not self.held.grow(self.num_bytes):
            self._refuse("full")
        return message

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(max(0.0, self._ends_s - time.monotonic())):
                return await self._receive()
        except TimeoutError:
            self._refuse("slow")

    async def _decoded(self, decoder: Decoder) -> Message:
        """The next piece of the decoded body."""
        try:
            while not (piece := decoder.pull()):
                if self._is_all_here:
                    if not decoder.is_whole:
                        self._refuse("broken")
                    return {"type": "http.request", "body": b"", "more_body": False}
                message = await self._next()
                if message["type"] != "http.request":
                    return message
                decoder.push(message.get("body", b""))
                self._is_all_here = not message.get("more_body", False)
        except ValueError:
            self._refuse("broken")
        await asyncio.sleep(0)  # else 64 MiB, of which 2 KB may have come, are one long step
        return {"type": "http.request", "body": piece, "more_body": True}

    def _refuse(self, refusal: str) -> NoReturn:
        self.refusal = refusal
        raise _Refused


class _Refused(Exception):
    pass
