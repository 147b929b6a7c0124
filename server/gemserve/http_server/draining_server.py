"""The HTTP server around the application: its connections, and how it stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from gemserve.config import ServerConfig
from gemserve.http_server.connections import MAX_HEAD_BYTES, connection_limits, limited_protocol
from gemserve.http_server.descriptors import RareAcceptErrors, fit_connections

DRAIN_S = 25  # seconds that running requests may take to finish after SIGTERM
STEP_S = 15  # that the step may take which is under way then: its requests end after it
CLOSE_S = 5  # that clients then have to read what is left of their replies
_POLL_S = 0.1


class Stoppable(Protocol):
    """What has the running requests: an engine, or what stands in front of several."""

    @property
    def has_ended(self) -> bool:
        """Whether all requests have had their last event, and there will be no other ones."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and stop after `timeout_s`."""
        ...

    def stop(self, timeout_s: float = ...) -> None:
        """End all requests, each with its last event."""
        ...


class HttpServer(uvicorn.Server):
    """Stops in steps, one for each signal, and tells every client how its request ended.

    First it goes on to listen until all requests have ended, for `DRAIN_S` seconds at most:
    meanwhile `/ready` says that it is draining, and new requests get a 503. The second signal ends
    all requests, each with its last event. The third one ends the connections as they are. A client
    that does not read its reply holds the end up for `CLOSE_S`, and a long step for `STEP_S`.
    `on_listening` is called once, with the port, as soon as connections are accepted.
    """

    on_listening: Callable[[int], None] | None = None

    def __init__(self, config: uvicorn.Config, engine: Stoppable) -> None:
        super().__init__(config)
        self._engine = engine
        self._drains_until_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(RareAcceptErrors())
        await super().startup(sockets)
        if self.on_listening is not None and self.started:
            # --port 0 takes any
            ports = [each.getsockname()[1] for server in self.servers for each in server.sockets]
            self.on_listening(ports[0])

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGHUP drains too. A terminal sends it when it closes; nohup has it ignored."""
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        if self._drains_until_s is None:
            self._engine.drain(DRAIN_S)
            self._drains_until_s = time.monotonic() + DRAIN_S
        elif not self.should_exit:
            self._engine.stop(timeout_s=0)
            self.should_exit = True
        else:
            self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; those whose clients do not read, when the engine has ended."""
        self._engine.stop(timeout_s=0)  # by now it has drained, or has had the time for it
        dropping = asyncio.create_task(self._drop_connections())
        try:
            await super().shutdown(sockets)
        finally:
            dropping.cancel()

    async def _drop_connections(self) -> None:
        latest_s = time.monotonic() + STEP_S
        while not self._engine.has_ended and time.monotonic() < latest_s:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(CLOSE_S)
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if self._drains_until_s is not None:
            is_over = time.monotonic() >= self._drains_until_s
            self.should_exit |= is_over or not self.server_state.tasks
        return await super().on_tick(counter)


def http_server(
    app: ASGIApp, engine: Stoppable, config: ServerConfig, **options: Any
) -> HttpServer:
    """A server for the application. `options` are uvicorn's.

    It has no more connections than there are file descriptors for. Raises `ConfigError` if that is
    next to none.
    """
    config, backlog = fit_connections(config)
    settings = {
        "host": config.host,
        "port": config.port,
        "backlog": backlog,
        "log_level": "info",
        "timeout_keep_alive": 30,
        # longer than `STEP_S` and `CLOSE_S`, so that every reply ends before its task is cancelled
        "timeout_graceful_shutdown": DRAIN_S + 10,
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
        "http": limited_protocol(connection_limits(config)),
        "ws": "none",
        "loop": "asyncio",  # else uvloop, where another package has brought it along
        **options,
    }
    return HttpServer(uvicorn.Config(app, **settings), engine)
