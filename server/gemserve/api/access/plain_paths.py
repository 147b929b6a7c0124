"""ASGI middleware: doubled slashes and one at the end of a path count for nothing.

Clients make such paths when they join a base URL that ends in a slash with a path.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("//+")


class PlainPaths:
    """It sees a request first, so that keys, forms of errors and routes all see one path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = _SLASHES.sub("/", scope["path"])
            path = path.removesuffix("/") or "/"
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
