"""Errors under /api in Ollama's form: `{"error": message}`."""

from __future__ import annotations

import json

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

PATH = "/api"
_MOST_TEXT = 200


class OllamaError(TypedDict):
    error: str


class OllamaErrors:
    """ASGI middleware: writes what every part of the API says about errors in Ollama's form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # of an error, while its body comes
        body = b""

        async def rewrite(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _rewritten(start, body)(scope, receive, send)
                return
            await send(message)

        await self._app(scope, receive, rewrite)


def _rewritten(start: Message, body: bytes) -> JSONResponse:
    """The error `body`, which is in OpenAI's form or, from a library, a text."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:_MOST_TEXT].decode("utf-8", "replace")
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]
    }
    for name in ("content-length", "content-type"):
        headers.pop(name, None)
    content: OllamaError = {"error": message}
    return JSONResponse(content, status_code=start["status"], headers=headers)
