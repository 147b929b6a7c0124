"""ASGI middleware: bounded bodies, and a bounded request id on every response."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.api.error_replies import error_body
from gemserve.api.requests.request_builder import new_id

log = logging.getLogger("gemserve.api")
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives every request an id: the client's `X-Request-Id` if it is short and printable.

    An exception nobody expected is logged and answered here, so that its reply has an id too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _ACCEPTABLE_ID.fullmatch(given) else new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = [*message.get("headers", []), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if has_started:
                raise
            log.exception("request %s", request_id.decode())
            body = error_body("internal error", kind="server_error")
            await JSONResponse(body, status_code=500)(scope, receive, send_with_id)


def request_id_of(http: Request) -> str:
    return str(http.scope["state"]["request_id"])


class BodyLimit:
    """Answers 413 to a body above `max_bytes`, whether or not its length was announced."""

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

        async def counted() -> Message:
            nonlocal received, is_refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                is_refused = True
                raise _BodyTooLarge
            return message

        async def guarded(message: Message) -> None:
            if not is_refused:
                await send(message)

        try:
            await self._app(scope, counted, guarded)
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
