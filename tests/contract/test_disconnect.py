"""Clients that go away: their work stops within a second, is counted, and blocks nobody."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    FakeCore,
    live_server,
    parse_metrics,
    serving_over,
    wait_for,
)

ABORTED = 'request_success_total{finish_reason="abort"}'
LEFT = 'http_responses_total{status="499"}'
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RERANK, SCORE = "/v1/rerank", "/v1/score"
SENT = {
    **BODIES,
    RESPONSES: {"model": "fake", "input": "Hello there"},
    MESSAGES: {**BODIES[CHAT], "max_tokens": 9},
    RERANK: {"query": "Where?", "documents": ["Hello there", "Here"]},
    SCORE: {"text_1": ["Where?", "When?"], "text_2": ["Hello there", "Here"]},
}
both = pytest.mark.parametrize("stream", [True, False])


class Server:
    def __init__(self, url: str, core: FakeCore) -> None:
        self.url = url
        self.core = core
        self.port = int(url.rsplit(":", 1)[1])
        self.connections: list[socket.socket] = []

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as reply:
            return parse_metrics(reply.read().decode()).get(name, 0.0)

    def send(self, *, path: str = CHAT, stream: bool | None, cut: int = 0) -> socket.socket:
        """Post a request, less its last `cut` bytes, and return the open connection.

        `stream` None: the path has no streams.
        """
        fields = SENT[path] if stream is None else {**SENT[path], "stream": stream}
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        self.connections.append(connection)
        connection.sendall(head.encode() + body[: len(body) - cut])
        return connection


@pytest.fixture
def server(core: FakeCore, tokenizer: Any) -> Iterator[Server]:
    settings: dict[str, Any] = {"max_queue": 2, "keep_alive_s": 0.1}
    with live_server(serving_over(core, tokenizer, **settings)) as url:
        opened = Server(url, core)
        yield opened
        for connection in opened.connections:
            connection.close()


def read_until(connection: socket.socket, text: str) -> None:
    seen = b""
    while text.encode() not in seen:
        piece = connection.recv(4096)
        assert piece, seen
        seen += piece


@both
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_dropped_request_stops_within_a_second(
    server: Server, path: str, stream: bool, is_reset: bool
) -> None:
    server.core.script = (FILTERED, "one", threading.Event())
    connection = server.send(path=path, stream=stream)
    wait_for(server.core.started.is_set)
    if stream:
        read_until(connection, "one")
    if is_reset:  # a killed client: the kernel answers with RST instead of FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_for(server.core.cancelled.is_set, 1.0)
    wait_for(lambda: server.metric(ABORTED) == 1, 1.0)
    wait_for(lambda: server.metric("num_requests_running") == 0, 1.0)
    if not stream:  # it was counted as a 503
        wait_for(lambda: server.metric(LEFT) == 1, 1.0)


@pytest.mark.parametrize("path", [RERANK, SCORE])
def test_documents_of_a_dropped_request_are_not_read_on(server: Server, path: str) -> None:
    server.core.script = (threading.Event(),)
    connection = server.send(path=path, stream=None)
    wait_for(server.core.started.is_set)
    connection.close()
    wait_for(server.core.cancelled.is_set, 1.0)
    count = 2 if path == SCORE else 1  # a request for each query
    wait_for(lambda: server.metric(ABORTED) == count, 1.0)


@both
def test_a_request_dropped_before_its_first_token_stops(server: Server, stream: bool) -> None:
    server.core.script = (threading.Event(),)
    connection = server.send(stream=stream)
    wait_for(server.core.started.is_set)
    connection.close()
    wait_for(server.core.cancelled.is_set, 1.0)
    wait_for(lambda: server.metric(ABORTED) == 1, 1.0)
    wait_for(lambda: server.metric(LEFT) == 1, 1.0)


@both
def test_a_request_dropped_while_queued_never_runs(server: Server, stream: bool) -> None:
    gate = threading.Event()
    server.core.script = (FILTERED, gate)
    first = server.send(stream=False)
    wait_for(server.core.started.is_set)
    second = server.send(stream=stream)
    wait_for(lambda: server.metric("num_requests_waiting") == 1)
    second.close()
    time.sleep(0.2)  # nothing shows when the server has noticed
    gate.set()
    read_until(first, '"finish_reason":"stop"')
    wait_for(lambda: server.metric("num_requests_waiting") == 0, 1.0)
    wait_for(lambda: server.metric(ABORTED) == 1, 1.0)
    assert len(server.core.requests) == 1


@both
def test_a_request_dropped_while_queued_frees_its_place(server: Server, stream: bool) -> None:
    """A long request runs on; the queue must not stay full of clients that have left."""
    server.core.script = (FILTERED, threading.Event())
    server.send(stream=False)
    wait_for(server.core.started.is_set)
    for connection in [server.send(stream=stream) for _ in range(2)]:
        wait_for(lambda: server.metric("num_requests_waiting") > 0)
        connection.close()
    wait_for(lambda: server.metric(ABORTED) == 2, 1.0)
    wait_for(lambda: server.metric("num_requests_waiting") == 0, 1.0)


def test_a_client_that_reads_nothing_and_leaves_is_counted(server: Server) -> None:
    """Its stream fills every buffer; the worker must neither wait for it nor forget it."""
    server.core.script = (FILTERED, *(["x" * 4000] * 2000), threading.Event())
    connection = server.send(stream=True)
    wait_for(lambda: server.metric("num_requests_running") == 1)
    connection.close()
    wait_for(server.core.cancelled.is_set, 2.0)
    wait_for(lambda: server.metric(ABORTED) == 1, 2.0)


def test_a_client_that_leaves_within_its_body_starts_nothing(server: Server) -> None:
    server.send(stream=True, cut=5).close()
    wait_for(lambda: server.metric("num_requests_running") == 0)
    server.core.script = (FILTERED, "fine")
    whole = server.send(stream=False)
    read_until(whole, "fine")
    assert len(server.core.requests) == 1


def test_a_drop_is_no_error_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.send(stream=True, cut=5).close()
    server.core.script = (FILTERED, "one", threading.Event())
    connection = server.send(stream=True)
    read_until(connection, "one")
    connection.close()
    wait_for(lambda: server.metric(ABORTED) == 1, 2.0)
    assert [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []
