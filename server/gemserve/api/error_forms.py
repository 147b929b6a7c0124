"""Writes errors in the form of another protocol, whichever part of the API they come from."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.errors import ONE_LEFT

_MOST_TEXT = 200
# what `ContextExceeded` says, which may have come from another process
_COUNTED = re.compile(
    r"is (?P<context>\d+) tokens(?P<note>.*?)\. However, (?:.* contains (?:at least )?|"
    r".* \()(?P<prompt>\d+) in(?:put tokens| .*?(?P<answer>\d+) (?:in|for) the completion\))\. "
    r"Please reduce [^.]*\.(?P<detail>.*)",
    re.DOTALL,
)
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ExceededContext:
    """The counts in the message of a `ContextExceeded`, and the sentence behind them.

    `context`: tokens of prompt and answer. `longest`: the most tokens of a prompt. `answer`: tokens
    that the request wants for its answer; None: the prompt alone is too long.
    """

    context: int
    longest: int
    prompt: int
    answer: int | None
    note: str
    detail: str

    @staticmethod
    def find(error: Mapping[str, Any]) -> ExceededContext | None:
        """The counts of an error in OpenAI's form; None if it is another one."""
        is_exceeded = error.get("code") == "context_length_exceeded"
        counted = _COUNTED.search(error["message"]) if is_exceeded else None
        if counted is None:
            return None
        context, answer, detail = int(counted["context"]), counted["answer"], counted["detail"]
        return ExceededContext(
            context=context,
            longest=context - (ONE_LEFT in detail),
            prompt=int(counted["prompt"]),
            answer=None if answer is None else int(answer),
            note=counted["note"],
            detail=detail.replace(ONE_LEFT, "").strip(),
        )


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
