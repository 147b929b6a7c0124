"""`/`: the page that shows what a filter kept. Its files lie in `gemserve/inspector`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

from gemserve.api.access.gate import page_files

# The page runs its own scripts only, and connects to nothing but its server. No other page may
# frame it: a click in it may spend the quota of the key that it holds.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def inspector_routes() -> APIRouter:
    """The page and its files, read once. They are no part of the API, nor of its document."""
    routes = APIRouter()
    folder = files("gemserve") / "inspector"
    for path, name in page_files().items():
        content = (folder / name).read_bytes()
        routes.add_api_route(
            path, _reply_with(content, _TYPES[name.rpartition(".")[2]]), include_in_schema=False
        )
    return routes


def _reply_with(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def get_file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return get_file
