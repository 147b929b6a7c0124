"""The forms that a request's head may have, as RFC 9112 wants servers to read them.

h11 takes what follows an empty line for no request, joins folded lines, and hands on targets and
versions as they are.
"""

from __future__ import annotations

import re

import h11

_ABSOLUTE = re.compile(rb"https?://([^/?]+)([^?]*)(.*)", re.IGNORECASE)
_FOLD = re.compile(rb"\n[ \t]")  # the line continues the header above it
_HEAD_END = re.compile(rb"\n\r?\n")


class BadRequest(h11.RemoteProtocolError):
    """A request that h11 would take; the message says what is wrong with it."""


class RequestConnection(h11.Connection):
    """The server's side of a connection. `next_event` raises `BadRequest`.

    Empty lines in front of a request count for nothing, and neither does what a client sends behind
    its last one. A target of the form `http://host/path` becomes the path, and its host `Host`.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state not in (h11.IDLE, h11.MUST_CLOSE):
            return super().next_event()
        received, _ = self.trailing_data
        is_last = self.their_state is h11.MUST_CLOSE
        rest = b"" if is_last else received.lstrip(b"\r\n")
        self._receive_buffer.maybe_extract_at_most(len(received) - len(rest))
        event = super().next_event()
        return _checked(event, rest) if isinstance(event, h11.Request) else event


def _checked(request: h11.Request, received: bytes) -> h11.Request:
    """The request with a path as its target. `received`: its head, and what came with it.

    Raises `BadRequest`.
    """
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode("ascii")
        raise BadRequest(f"HTTP/{version}: this server speaks HTTP/1.1.", 505)
    end = _HEAD_END.search(received)
    if _FOLD.search(received, 0, len(received) if end is None else end.start()):
        raise BadRequest("A header is folded over several lines; write each in one line.")
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    host, path, query = absolute.groups()
    if b"@" in host:
        raise BadRequest("The target names a user; send a key as a header.")
    others = [item for item in request.headers.raw_items() if item[0].lower() != b"host"]
    return h11.Request(
        method=request.method,
        target=(path or b"/") + query,
        headers=[(b"Host", host), *others],
        http_version=request.http_version,
    )
