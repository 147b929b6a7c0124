"""ASGI middleware: an id for every request, and for every reply that the API makes."""

from __future__ import annotations

import logging
import re
import uuid

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.api.error_replies import error_body

log = logging.getLogger("gemserve.api")
_ACCEPTABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives every request an id: the client's `X-Request-Id` if it is short and printable.

    It also logs and answers unexpected exceptions, so that their replies have an id too.
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


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
