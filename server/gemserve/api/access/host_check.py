"""ASGI middleware: refuses requests that were sent to a name which is not the server's.

A page in a browser may let its own name lead to this machine after it was loaded (DNS rebinding).
The browser then takes the server's replies for the page's own and shows them to it. It still names
the page's host in each request. A server that has no keys, and that only this machine can reach,
would have no other defence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.error_replies import error_response
from gemserve.config import ServerConfig
from gemserve.errors import HostNotAllowed

ANY_HOST = "*"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:]*)(?::[0-9]*)?", re.IGNORECASE)


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """The names, beside those of this machine, by which the server may be reached. None: any."""
    if ANY_HOST in config.allowed_hosts:
        return None
    if not config.allowed_hosts and (config.api_key_file or not is_loopback(config.host)):
        return None
    return frozenset(name.lower() for name in config.allowed_hosts)


def is_loopback(name: str) -> bool:
    """Does the name or address, which may have brackets, always mean this machine?"""
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class HostCheck:
    """Answers 403 if `Host` is neither this machine nor one of `names`, whatever the port is.

    A request without `Host` passes: browsers always send one. `on_refusal` is called with the code.
    """

    def __init__(
        self, app: ASGIApp, *, names: Collection[str], on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._names = names
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if host and not self._is_allowed(host):
                error = HostNotAllowed(host)
                self._on_refusal(error.code)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        return match is not None and (is_loopback(match[1]) or match[1].lower() in self._names)
