"""ASGI middleware: request bodies have a largest size."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.api.error_replies import error_body


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, whether or not its length was announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refusal(int(announced))(scope, receive, send)
            return
        received = 0
        is_refused = False

        async def receive_and_count() -> Message:
            nonlocal received, is_refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                is_refused = True
                raise _BodyTooLarge
            return message

        async def send_unless_refused(message: Message) -> None:
            if not is_refused:
                await send(message)

        try:
            await self._app(scope, receive_and_count, send_unless_refused)
        except Exception:
            if not is_refused:
                raise
        if is_refused:
            await self._refusal(received)(scope, receive, send)

    def _refusal(self, size: int) -> Any:
        message = f"The body has {size} bytes or more, the limit is {self._max_bytes}."
        body = error_body(message, kind="invalid_request_error", code="body_too_large")
        return JSONResponse(body, status_code=413)


class _BodyTooLarge(Exception):
    pass
