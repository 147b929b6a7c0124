"""Answers on the server's port while the model is loaded, always with a 503. No torch."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Literal

from gemserve.errors import ConfigError

_READ_TIMEOUT_S = 1.0  # one client is answered at a time
_RETRY_AFTER_S = 5
LoadingPhase = Literal["loading", "calibrating"]


class LoadingProbe:
    """Listens from `__enter__` to `__exit__`. `phase` is what `/health` and `/ready` tell.

    It does nothing if `port` is 0, because nobody can know the port yet.
    """

    def __init__(self, host: str, port: int) -> None:
        self.phase: LoadingPhase = "loading"
        self._address = host, port
        self._server: _Server | None = None

    def __enter__(self) -> LoadingProbe:
        """Raises `ConfigError` if the port is taken."""
        if self._address[1]:
            try:
                self._server = _Server(self._address, self)
            except OSError as error:
                host, port = self._address
                raise ConfigError(
                    f"--host={host} --port={port}: cannot listen there: {error}"
                ) from error
            run = self._server.serve_forever
            threading.Thread(target=run, args=(0.05,), name="gemserve-probe", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the port go, so that the server can have it."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Server(HTTPServer):
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], probe: LoadingProbe) -> None:
        self.probe = probe
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks a name server

    def handle_error(self, request: object, client_address: object) -> None:
        """Print a traceback, unless it was the client that has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    timeout = _READ_TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        """Answer one request, or end the connection: a byte now and then keeps no other waiting."""
        ending = threading.Timer(_READ_TIMEOUT_S, self._end)
        ending.daemon = True
        ending.start()
        try:
            super().handle()
        finally:
            ending.cancel()

    def _end(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        phase = self.server.probe.phase
        content: dict[str, object] = {"status": phase}
        if self.path not in ("/health", "/ready"):
            message = f"The server is {phase} its model."
            detail = {"message": message, "type": "overloaded_error", "param": None, "code": phase}
            content = {"error": detail}
        data = json.dumps(content).encode()
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", str(_RETRY_AFTER_S))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_POST = do_DELETE = do_OPTIONS = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Write no line: monitoring asks often."""
