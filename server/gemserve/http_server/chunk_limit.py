"""HTTP/1.1 connections whose bodies have one length, and do not come in tiny chunks.

A chunk of one byte costs the event loop as much as one of 64 KiB. Without a limit, 300 KB a second
of them keep a whole server busy, even if it has refused the request already.

A request with both Content-Length and Transfer-Encoding may end at different places for a proxy and
for this server, so that the rest of it becomes a request that the proxy has not seen.
"""

from __future__ import annotations

import h11

FREE_CHUNKS = 1000  # of a body, of any size
LEAST_CHUNK_BYTES = 64  # of the others on average


class BadBody(h11.RemoteProtocolError):
    """A body comes in more chunks than its bytes need, or has two lengths."""


class ChunkLimitedConnection(h11.Connection):
    """The server's side of a connection. `next_event` raises `BadBody`."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise BadBody("Content-Length and Transfer-Encoding were sent; send one of them.")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // LEAST_CHUNK_BYTES:
                raise BadBody(
                    f"The body has {self._num_chunks} chunks with {self._num_bytes} bytes. Beyond "
                    f"{FREE_CHUNKS} chunks they must have {LEAST_CHUNK_BYTES} bytes on average."
                )
        return event
