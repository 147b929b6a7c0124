"""Limits on connections, which the application cannot set: it sees a request when its head is read.

Each connection has so long for a request's head, so long for its body, and must read replies at
some pace. A body must not come in tiny chunks. Who breaks a limit loses the connection. There is a
largest number of connections. When it is reached, a new one takes the place of the one that has
waited longest without a request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from gemserve.api.error_replies import ErrorKind, error_body
from gemserve.config import ServerConfig
from gemserve.http_server.request_forms import BadRequest, RequestConnection

MAX_HEAD_BYTES = 64 << 10  # of a request's head
# A client sends a head in one go. Those that send none hold a connection until then, but give it up
# at once when all are taken.
HEAD_TIMEOUT_S = 10.0
# A chunk of one byte costs the event loop as much as one of 64 KiB. Without a limit, 300 KB of them
# a second keep a whole server busy, even if it has refused the request already.
FREE_CHUNKS = 1000  # of a body, of any size
LEAST_CHUNK_BYTES = 64  # of the others on average
LEAST_READ_BYTES = 64 << 10  # of a reply, within the timeout
_SLACK_S = 5.0  # the application answers a slow body first, with a 408


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`head_s`: for a request's head, and for a new connection to send one. `body_s`: for a body.

    `stall_s`: time in which a reply's reader must read `LEAST_READ_BYTES`.
    """

    max_connections: int
    head_s: float
    body_s: float
    stall_s: float


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.max_connections,
        head_s=HEAD_TIMEOUT_S,
        body_s=config.body_timeout_s,
        stall_s=config.read_timeout_s,
    )


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """uvicorn's protocol for HTTP/1.1 with these limits, for `uvicorn.Config(http=…)`."""

    class LimitedProtocol(_LimitedProtocol):
        connection_limits = limits
        idle: ClassVar[OrderedDict[_LimitedProtocol, None]] = OrderedDict()

    return LimitedProtocol


class ChunkLimitedConnection(RequestConnection):
    """The server's side of a connection. `next_event` raises `BadRequest`.

    A body has one length: with both Content-Length and Transfer-Encoding a request may end at
    different places for a proxy and for this server, so that the rest of it becomes a request that
    the proxy has not seen.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(max_incomplete_event_size)
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise BadRequest(
                    "Content-Length and Transfer-Encoding were sent; send one of them."
                )
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // LEAST_CHUNK_BYTES:
                raise BadRequest(
                    f"The body has {self._num_chunks} chunks with {self._num_bytes} bytes. Beyond "
                    f"{FREE_CHUNKS} chunks they must have {LEAST_CHUNK_BYTES} bytes on average."
                )
        return event


class _LimitedProtocol(H11Protocol):
    connection_limits: ConnectionLimits
    # the server's connections without a request in progress; the first has waited longest
    idle: ClassVar[OrderedDict[_LimitedProtocol, None]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = ChunkLimitedConnection(MAX_HEAD_BYTES)
        self._sending: asyncio.TimerHandle | None = None  # until the client has sent its request
        self._sends_body = False
        self._reading: asyncio.TimerHandle | None = None  # until it has read a part of the reply

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self.connection_limits.max_connections
        if len(self.connections) > limit and not self._take_idle_place():
            message = f"The server has {limit} connections, which is its limit."
            self._refuse(503, message, "overloaded_error", "too_many_connections")
            return
        self._note_idle()
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or (self._waits_for_head and not data.strip(b"\r\n")):
            return  # an empty line begins no request
        super().data_received(data)
        self._note_idle()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> None:
        super().eof_received()
        self._expect_reading()  # the transport closes now, once everything is read

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()
        self._note_idle()
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None and not self.transport.is_closing():
            self._reading.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()  # closing waits until everything is read

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # of which uvicorn tells nothing else
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the reply has begun, or is sent
            self._expect_reading()
            return
        status, code = 400, "invalid_http"
        if isinstance(error, h11.RemoteProtocolError):
            status = error.error_status_hint
            # h11 shows the line behind it, which may have a key
            msg = f"Invalid HTTP: {str(error).partition(': bytearray(')[0].removesuffix('.')}."
        if status == 431:
            msg = f"The request's head has more than {MAX_HEAD_BYTES} bytes, the limit."
            code = "head_too_large"
        self._refuse(status, msg, "invalid_request_error", code)

    @property
    def _waits_for_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _note_idle(self) -> None:
        """Note whether the client has yet to send a request, its first or a further one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle.pop(self, None)
        elif not self.transport.is_closing():
            self.idle.setdefault(self)

    def _take_idle_place(self) -> bool:
        """Close the connection that has waited longest; not one that still reads its reply.

        False: there is none.
        """
        able = (each for each in self.idle if not each.transport.get_write_buffer_size())
        oldest = next(able, None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.close()
        return True

    def _set_deadline(self) -> None:
        """Let the time run for what the client has to send next, if it has to send anything."""
        is_body = self.conn.their_state is h11.SEND_BODY
        is_head = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if self._sending is not None and is_body == self._sends_body and (is_body or is_head):
            return  # it runs already
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        self._sends_body = is_body
        if is_body or is_head:
            limits = self.connection_limits
            seconds = limits.body_s + _SLACK_S if is_body else limits.head_s
            self._sending = self.loop.call_later(seconds, self._sent_too_slowly)

    def _sent_too_slowly(self) -> None:
        if self._sends_body:
            self.transport.abort()
            return
        seconds = self.connection_limits.head_s
        message = f"No request's head came within {seconds:g} s, which is the limit."
        self._refuse(408, message, "invalid_request_error", "request_timeout")

    def _expect_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        if self._reading is not None:
            self._reading.cancel()
        stall_s = self.connection_limits.stall_s
        self._reading = self.loop.call_later(stall_s, self._check_reading, waiting)

    def _check_reading(self, waiting: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left and left > waiting - LEAST_READ_BYTES:
            self.logger.warning("a client has stopped reading its reply; it loses the connection")
            self.transport.abort()
        elif left:
            self._expect_reading()

    def _refuse(self, status: int, message: str, kind: ErrorKind, code: str) -> None:
        """Send an error, before there is a request or in place of one, and close the connection."""
        content = json.dumps(error_body(message, kind=kind, code=code)).encode()
        head = [
            f"HTTP/1.1 {status} {STATUS_PHRASES[status].decode()}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            "connection: close",
            *(["retry-after: 1"] if status == 503 else []),
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + content)
        self.transport.close()
        self._expect_reading()
