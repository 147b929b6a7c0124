"""ASGI middleware: an id for every request, and for every reply that the API makes.

It also writes one line into the log for every reply, with the id.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.api.error_replies import error_body

log = logging.getLogger("gemserve.api")
access_log = logging.getLogger("gemserve.access")
# the id of the request that the current task or thread works for
current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
CLIENT_LEFT = 499  # in logs and metrics: the client left before the reply began
MAX_LOGGED_PATH = 300  # characters
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# which monitoring asks for every few seconds
_POLLED = frozenset({"/health", "/ping", "/ready", "/metrics"})


class RequestId:
    """Gives every request an id: the client's `X-Request-Id` if it is short and printable.

    It also logs and answers unexpected exceptions, so that their replies have an id too.
    `on_reply` is called with the status of every reply that has ended, and `on_error` for every
    such exception.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_reply: Callable[[int], None],
        on_error: Callable[[], None],
    ) -> None:
        self._app = app
        self._on_reply = on_reply
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _ACCEPTABLE_ID.fullmatch(given) else new_id("req").encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        status = 0
        has_left = False
        began_s = time.monotonic()

        async def receive_until_left() -> Message:
            nonlocal has_left
            message = await receive()
            has_left |= message["type"] == "http.disconnect" and not status
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (b"x-request-id", request_id)]
                message = {**message, "headers": headers}
            await send(message)

        token = current_request_id.set(request_id.decode())
        try:
            await self._app(scope, receive_until_left, send_with_id)
        except Exception:
            self._on_error()
            if status:
                raise
            log.exception("request %s", request_id.decode())
            body = error_body("internal error", kind="server_error")
            await JSONResponse(body, status_code=500)(scope, receive, send_with_id)
        finally:
            if has_left or not status:  # what is sent then, nobody gets
                status = CLIENT_LEFT
            _write_line(scope, status, time.monotonic() - began_s)
            self._on_reply(status)
            current_request_id.reset(token)


def _write_line(scope: Scope, status: int, seconds: float) -> None:
    """One line for one reply. A path is quoted, because it may contain anything."""
    fields = {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": quote(scope["path"])[:MAX_LOGGED_PATH],
        "status": status,
        "duration_ms": round(seconds * 1e3, 1),
    }
    level = logging.DEBUG if scope["path"] in _POLLED and status < 500 else logging.INFO
    line = "request %(request_id)s: %(method)s %(path)s %(status)d in %(duration_ms).0f ms"
    if (difference := scope["state"].get("first_difference")) is not None:
        fields["first_difference"] = difference
        line += ", first difference: %(first_difference)s"
    access_log.log(level, line, fields, extra=fields)


def request_id_of(http: Request) -> str:
    return str(http.scope["state"]["request_id"])


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
