"""Connections that send or read too slowly, or that are too many, end; and how the server stops."""

from __future__ import annotations

import json
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest

from gemserve.api.app import create_app
from gemserve.config import ServerConfig
from gemserve.http_server import connections as http_connections
from gemserve.http_server import draining_server as http_server_module
from gemserve.http_server.draining_server import HttpServer, http_server
from tests.fakes import COMPLETIONS, FILTERED, FakeCore, serving_over, wait_for

BODY = {"model": "fake", "prompt": "Hello"}


@contextmanager
def served(core: FakeCore, tokenizer: Any, **settings: Any) -> Iterator[tuple[int, HttpServer]]:
    """The application on a free port, as `gemserve serve` runs it; yields the port."""
    config = ServerConfig(port=0, **settings)
    serving = serving_over(core, tokenizer, max_queue=16, **settings)
    server = http_server(create_app(serving), serving.engine, config, log_config=None)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, 20)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        serving.engine.stop()
        server.should_exit = True
        thread.join(20)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(port)) for _ in range(count)]


def reply_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of a reply after which the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, content = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def head(path: str = COMPLETIONS, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_whole_head_ends(
    tokenizer: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 silent connections and 200 half requests stayed open for ever."""
    monkeypatch.setattr(http_connections, "HEAD_TIMEOUT_S", 0.3)
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(sent)
        status, body = reply_of(held)
    assert (status, body["error"]["code"]) == (408, "request_timeout")


def test_a_second_head_that_never_ends_ends_the_connection(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEAD_TIMEOUT_S", 0.5)
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in held.recv(65536)
        for _ in range(100):  # the time is that of the whole head, however it trickles in
            try:
                held.sendall(b"G" if _ == 0 else b"E")
                time.sleep(0.1)
            except OSError:
                break
        else:
            raise AssertionError("the connection is still open")


def test_a_body_that_never_ends_is_a_408(tokenizer: Any) -> None:
    with served(FakeCore(), tokenizer, body_timeout_s=0.3) as (port, _), connect(port) as held:
        held.sendall(head(**{"Content-Length": 100}) + b'{"model"')
        held.settimeout(5)
        data = b""
        while b"}}" not in data:  # head and body may come one after the other
            data += held.recv(65536)
    assert data.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in data


def test_bodies_share_a_memory_and_short_ones_pass(tokenizer: Any) -> None:
    """Ten clients that held 59 of 60 MiB each took 1.1 GB."""
    settings = {"max_body_bytes": 200_000, "body_memory_bytes": 300_000}
    with served(FakeCore(), tokenizer, **settings) as (port, _), connections(port, 4) as held:
        for each in held:
            each.sendall(head(**{"Content-Length": 190_000}) + b" " * 189_000)
        (answered, *_), *_ = select.select(held, [], [], 20)
        refused = b""
        while b"}}" not in refused:
            refused += answered.recv(65536)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in refused.lower()
        assert b"body_memory_full" in refused
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        assert httpx.post(url, json=BODY).status_code == 200
        for each in held:
            each.close()
        long = json.dumps(BODY) + " " * 150_000
        wait_for(lambda: httpx.post(url, content=long).status_code == 200)


def test_one_connection_too_many_is_told_so(tokenizer: Any) -> None:
    """A request in progress keeps its place: see also test_attacks.py."""
    limited = served(FakeCore(FILTERED, threading.Event()), tokenizer, max_connections=2)
    content = json.dumps({**BODY, "stream": True}).encode()
    with limited as (port, server), connections(port, 2) as held:
        for each in held:
            each.sendall(head(**{"Content-Length": len(content)}) + content)
        wait_for(lambda: len(server.server_state.tasks) == 2)
        with connect(port) as late:
            status, body = reply_of(late)
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        for each in held:
            each.close()
        url = f"http://127.0.0.1:{port}/health"
        wait_for(lambda: httpx.get(url).status_code == 200)


def test_a_reader_who_stops_loses_its_stream(tokenizer: Any) -> None:
    """The engine's work for it ends, and so does the memory of what it did not read."""
    core = FakeCore(FILTERED, *["x" * 50_000] * 1000, threading.Event())
    with served(core, tokenizer, read_timeout_s=0.5) as (port, server), connect(port) as held:
        content = json.dumps({**BODY, "stream": True}).encode()
        held.sendall(head(**{"Content-Length": len(content)}) + content)
        wait_for(core.started.is_set)
        wait_for(core.cancelled.is_set, 20)
        wait_for(lambda: not server.server_state.connections)


def test_a_whole_reply_that_nobody_reads_is_dropped(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, *["x" * 50_000] * 400)
    with served(core, tokenizer, read_timeout_s=0.5) as (port, server), connect(port) as held:
        content = json.dumps(BODY).encode()
        held.sendall(head(**{"Content-Length": len(content)}) + content)
        wait_for(core.started.is_set)
        wait_for(lambda: not server.server_state.connections, 20)


def ask_for_metrics(connection: socket.socket, server: HttpServer) -> None:
    """Send a request whose reply has tens of kilobytes, and wait until it is written."""
    answered = server.server_state.total_requests
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_for(lambda: server.server_state.total_requests > answered)


def unsent(server: HttpServer) -> int:
    """Bytes of its only connection that the system has not taken."""
    each: Any
    (each,) = server.server_state.connections
    return int(each.transport.get_write_buffer_size())


@pytest.mark.parametrize("says_so", [True, False])
def test_a_connection_that_is_to_close_does_not_wait_for_its_reader(
    tokenizer: Any, says_so: bool
) -> None:
    """Less than makes the transport pause was left, and it stayed open for ever."""
    with served(FakeCore(), tokenizer, read_timeout_s=0.5) as (port, server), connect(port) as held:
        ask_for_metrics(held, server)
        for _ in range(2):  # the system may take more after a moment
            while not unsent(server):
                ask_for_metrics(held, server)
            time.sleep(0.1)
        if says_so:
            held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        else:
            held.shutdown(socket.SHUT_WR)
        wait_for(lambda: not server.server_state.connections, 10)


def test_a_slow_reader_who_goes_on_gets_everything(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, *["x" * 50_000] * 40)
    with served(core, tokenizer, read_timeout_s=2) as (port, _), connect(port) as slow:
        content = json.dumps({**BODY, "stream": True}).encode()
        slow.sendall(head(**{"Content-Length": len(content)}) + content)
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += slow.recv(100_000)
            time.sleep(0.02)
    assert data.count(b"x" * 50_000) == 40


def test_a_head_that_is_too_long_is_told_the_limit(tokenizer: Any) -> None:
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(b"GET /health HTTP/1.1\r\nX: ".ljust(65_500, b"x"))
        held.sendall(b"x" * 100)
        status, body = reply_of(held)
    assert (status, body["error"]["code"]) == (431, "head_too_large")
    assert "65536 bytes, the limit" in body["error"]["message"]


@pytest.mark.parametrize("length", ["abc", "-1", "1, 2"])
def test_a_bad_content_length_is_a_400_in_openai_s_form(tokenizer: Any, length: str) -> None:
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(head(**{"Content-Length": length}))
        status, body = reply_of(held)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/nothing"])
def test_a_body_in_tiny_chunks_ends_its_connection(tokenizer: Any, path: str) -> None:
    """Eight connections with such bodies, refused or not, kept /health waiting for 10 s."""
    chunked = head(path, **{"Transfer-Encoding": "chunked"})
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(chunked)
        data = b""
        with suppress(ConnectionError):  # a reset, because not all that was sent is read
            if path != COMPLETIONS:  # its reply does not wait for the body
                data += held.recv(65536)
            held.sendall(b"1\r\na\r\n" * 2000)
            while part := held.recv(65536):
                data += part
            held.sendall(b"1\r\na\r\n" * 2000)
            data += held.recv(65536)
        assert data.count(b"HTTP/1.1 4") == 1, "one reply"
        assert path != COMPLETIONS or b"chunks" in data
        with connect(port) as other:  # 1,000 chunks are free, and larger ones do not count
            pieces = [b"a" * (100 if i >= 1000 else 1) for i in range(3000)]
            other.sendall(
                chunked.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
            )
            answer = b""
            with suppress(ConnectionError):  # a 404 ends the connection before all is sent
                other.sendall(b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces))
                other.sendall(b"0\r\n\r\n")
                answer = other.recv(65536)
            assert answer or path != COMPLETIONS
            assert b"chunks" not in answer


def test_a_body_of_two_lengths_is_refused_with_what_follows(tokenizer: Any) -> None:
    """The bytes behind it were answered as a request of their own, which a proxy had not seen."""
    both = head(**{"Content-Length": 40, "Transfer-Encoding": "chunked"})
    with served(FakeCore(), tokenizer) as (port, _), connect(port) as held:
        held.sendall(both + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, body = reply_of(held)
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert "Transfer-Encoding" in body["error"]["message"]


def test_draining_shows_on_ready_while_streams_go_on(tokenizer: Any) -> None:
    gate = threading.Event()
    core = FakeCore(FILTERED, "a", gate, "b")
    with served(core, tokenizer) as (port, server):
        url = f"http://127.0.0.1:{port}"
        with httpx.stream("POST", url + COMPLETIONS, json={**BODY, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            ready = httpx.get(f"{url}/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "shutting down")
            assert httpx.post(url + COMPLETIONS, json=BODY).status_code == 503
            gate.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_for(lambda: server.should_exit)


def test_a_reader_who_stops_does_not_hold_up_the_end(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 64 s, longer than orchestrators wait before they kill the process."""
    monkeypatch.setattr(http_server_module, "DRAIN_S", 0.3)
    monkeypatch.setattr(http_server_module, "CLOSE_S", 0.3)
    core = FakeCore(FILTERED, *["x" * 50_000] * 1000, threading.Event())
    with served(core, tokenizer, read_timeout_s=60) as (port, server), connect(port) as held:
        content = json.dumps({**BODY, "stream": True}).encode()
        held.sendall(head(**{"Content-Length": len(content)}) + content)
        wait_for(core.started.is_set)
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server.should_exit and not server.server_state.tasks, 10)
        wait_for(lambda: not server.server_state.connections, 5)


class SlowCore(FakeCore):
    """`is_slow`: set it, and the next step takes 3 s."""

    def __init__(self, *script: Any) -> None:
        super().__init__(*script)
        self.is_slow = threading.Event()

    def step(self) -> Any:
        if self.is_slow.is_set():
            self.is_slow.clear()
            time.sleep(3)
        return super().step()


def test_a_long_step_at_the_end_of_the_drain_cuts_no_stream(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections were dropped before the engine could end their requests."""
    monkeypatch.setattr(http_server_module, "DRAIN_S", 0.5)
    monkeypatch.setattr(http_server_module, "CLOSE_S", 1)
    core = SlowCore(FILTERED, "a", threading.Event())
    with served(core, tokenizer) as (port, server):
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        with httpx.stream("POST", url, json={**BODY, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            core.is_slow.set()
            server.handle_exit(signal.SIGTERM, None)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        (end,) = (each for each in map(json.loads, events[:-1]) if "error" in each)
        assert end["error"]["code"] == "cancelled"


def test_a_second_signal_ends_streams_with_their_last_event(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "a", threading.Event())
    with served(core, tokenizer) as (port, server):
        url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        with httpx.stream("POST", url, json={**BODY, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGINT, None)
            server.handle_exit(signal.SIGINT, None)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_for(lambda: not server.server_state.connections)
