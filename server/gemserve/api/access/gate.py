"""ASGI middleware: who may come in, and how often. It answers before a body is read."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.access.keys import Keys
from gemserve.api.access.quota import Quota
from gemserve.api.error_replies import error_response
from gemserve.errors import InvalidKey, QuotaExceeded

# what probes and Prometheus read; a path that is not here needs a key, existing or not
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})


class Gate:
    """Answers 401 without a valid key, and 429 to a POST beyond what its key may do.

    A POST holds its key's place until its reply has ended, however it ends. `refused` is told the
    code of every refusal. Routes find the `Caller` in the request's state.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, quota: Quota, refused: Callable[[str], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._quota = quota
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        is_counted = scope["method"] == "POST"
        try:
            caller = self._keys.identify(scope["headers"])
            if is_counted:
                self._quota.enter(caller.key)
        except (InvalidKey, QuotaExceeded) as error:
            self._refused(error.code)
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        try:
            await self._app(scope, receive, send)
        finally:
            if is_counted:
                self._quota.leave(caller.key)
