"""ASGI middleware: checks the API key and its quota before a body is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from starlette.types import ASGIApp, Receive, Scope, Send

from gemserve.api.access.keys import Keys
from gemserve.api.access.quota import Quota, QuotaPlace
from gemserve.api.error_replies import error_response
from gemserve.errors import InvalidKey, QuotaExceeded

# Probes and Prometheus read these without a key. Every other path needs one, even if it is unknown.
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})


@cache
def page_files() -> dict[str, str]:
    """The inspector page's files by their paths. They are open, too: the page asks for the key."""
    names = (entry.name for entry in (files("gemserve") / "inspector").iterdir())
    named = {f"/inspector/{name}": name for name in names if name != "index.html"}
    return {"/": "index.html", **dict(sorted(named.items()))}


class Gate:
    """Answers 401 without a valid key, and 429 to a POST beyond what its key may do.

    A POST counts as running until its reply has ended, however it ends, or until the work has ended
    that a route hands its place to. `on_refusal` is called with
    the code of every refusal. Routes find the `Caller` and its `QuotaPlace` in the request's state.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, quota: Quota, on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | page_files().keys()
        self._keys = keys
        self._quota = quota
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        place: QuotaPlace | None = None
        try:
            caller = self._keys.identify(scope["headers"])
            if scope["method"] == "POST":
                place = QuotaPlace(self._quota, caller.key)
        except (InvalidKey, QuotaExceeded) as error:
            self._on_refusal(error.code)
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(caller=caller, place=place)
        try:
            await self._app(scope, receive, send)
        finally:
            if place is not None:
                place.leave()
