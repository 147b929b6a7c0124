"""Writes errors in the form of another protocol, whichever part of the API they come from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST_TEXT = 200
Headers = list[tuple[bytes, bytes]]


class ErrorForm(ABC):
    """ASGI middleware over the paths at and below `path`. A protocol is a subclass."""

    path: str

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def headers(self, given: Headers) -> Headers:
        """The headers of every reply. By default they stay as they are."""
        return given

    @abstractmethod
    def content(
        self, error: Mapping[str, Any], status: int, headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """The body of an error. `error`: its `message`, and what else OpenAI's form has."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_below = path == self.path or path.startswith(f"{self.path}/")
        if scope["type"] != "http" or not is_below:
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # of an error, while its body comes
        body = b""

        async def rewrite(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                message = {**message, "headers": self.headers(message["headers"])}
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._rewritten(start, body)(scope, receive, send)
                return
            await send(message)

        await self._app(scope, receive, rewrite)

    def _rewritten(self, start: Message, body: bytes) -> JSONResponse:
        """The error `body`, which is in OpenAI's form or, from a library, a text."""
        try:
            error = json.loads(body)["error"]
            error["message"]
        except (ValueError, KeyError, TypeError):
            error = {"message": body[:_MOST_TEXT].decode("utf-8", "replace")}
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in start["headers"]
        }
        content = self.content(error, start["status"], headers)
        for name in ("content-length", "content-type"):
            headers.pop(name, None)
        return JSONResponse(content, status_code=start["status"], headers=headers)
