"""Errors under /v1/messages in Anthropic's form: `{"type": "error", "error", "request_id"}`."""

from __future__ import annotations

import json
import re
from typing import Literal

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

PATH = "/v1/messages"
_MOST_TEXT = 200
AnthropicErrorKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_KINDS: dict[int, AnthropicErrorKind] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicErrorDetail(TypedDict):
    type: AnthropicErrorKind
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def anthropic_error(
    message: str, *, status: int, request_id: str, is_overloaded: bool = False
) -> AnthropicError:
    kind: AnthropicErrorKind = "api_error" if status >= 500 else "invalid_request_error"
    kind = "overloaded_error" if is_overloaded else _KINDS.get(status, kind)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


class AnthropicErrors:
    """ASGI middleware: writes what every part of the API says about errors in Anthropic's form.

    It also sends the request's id under Anthropic's name. The middleware that gives ids is inside.
    """

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
                message = {**message, "headers": _with_request_id(message["headers"])}
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


Headers = list[tuple[bytes, bytes]]


def _with_request_id(headers: Headers) -> Headers:
    given = [value for name, value in headers if name.lower() == b"x-request-id"]
    return [*headers, *((b"request-id", value) for value in given)]


def _too_long(message: str) -> str:
    """What `PromptTooLong` says, in the words by which clients know it.

    Claude Code takes both counts from there, and summarizes a conversation that is shorter by as
    much.
    """
    counted = re.search(r"is (\d+) tokens(.*)\. However, .* (\d+) input tokens", message)
    if counted is None:
        return f"prompt is too long: {message}"
    limit, note, tokens = counted.groups()
    return f"prompt is too long: {tokens} tokens > {limit} maximum{note}"


def _rewritten(start: Message, body: bytes) -> JSONResponse:
    """The error `body`, which is in OpenAI's form or, from a library, a text."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": body[:_MOST_TEXT].decode("utf-8", "replace")}
    message = error["message"]
    if error.get("code") == "context_length_exceeded":
        message = _too_long(message)
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]
    }
    content = anthropic_error(
        message,
        status=start["status"],
        request_id=headers.get("request-id", ""),
        is_overloaded=error.get("type") == "overloaded_error",
    )
    for name in ("content-length", "content-type"):
        headers.pop(name, None)
    return JSONResponse(content, status_code=start["status"], headers=headers)
