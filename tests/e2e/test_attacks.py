"""What an attacker's day found, each over a socket: docs/log/robustness.md has the harm it did."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from tests.fakes import (
    COMPLETIONS,
    FILTERED,
    MODEL,
    FakeCore,
    replace_file,
    serving_over,
    wait_for,
)
from tests.pdfs import pdf_of
from tests.served import PATIENCE_S, Served, served

DOCUMENTS = "/v1/documents"
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Starts a server over a scripted core with these settings."""
    with ExitStack() as stack:

        def start(core: FakeCore, **settings: Any) -> Served:
            serving = serving_over(core, tokenizer, max_queue=16, **settings)
            running: AbstractContextManager[Served] = served(serving)
            return stack.enter_context(running)

        yield start


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return replace_file(tmp_path / "keys", "alice", "bob")


def store(server: Served, key: dict[str, str], **fields: Any) -> httpx.Response:
    return httpx.post(
        server.url + DOCUMENTS,
        json={"text": "The river runs past the houses. " * 40, **fields},
        headers=key,
        timeout=PATIENCE_S,
    )


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


def request_of(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def get(connection: socket.socket, path: str = "/health") -> bytes:
    """The reply, an object, to a request on this connection, which stays open."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    data = b""
    while not data.endswith(b"}"):  # head and body may come one after the other
        part = connection.recv(65536)
        assert part, "the connection has ended"
        data += part
    return data


def test_idle_connections_give_way_to_new_ones(serve: Serve) -> None:
    """1,000 of them kept everybody out for the time of a head, again and again."""
    gate = threading.Event()
    server = serve(FakeCore(FILTERED, "a", gate, "b"), max_connections=4)
    held = server.server.server_state.connections
    with ExitStack() as stack:
        stream = stack.enter_context(server.send(COMPLETIONS, prompt="Hi", stream=True))
        assert b"200 OK" in stream.recv(65536)
        used = stack.enter_context(server.connect())
        assert b"200 OK" in get(used)
        silent = [stack.enter_context(server.connect()) for _ in range(2)]
        silent[0].sendall(b"GET /health HTTP/1.1\r\nHost:")
        wait_for(lambda: len(held) == 4)
        assert b"200 OK" in get(used)  # it has now waited for the shortest time
        late = [stack.enter_context(server.connect()) for _ in range(2)]
        assert b"200 OK" in get(late[1])
        assert not any(is_open(each) for each in silent)
        assert is_open(used)
        assert is_open(late[0])
        for _ in range(20):  # as many as anybody likes, one after the other
            with server.connect() as one:
                assert b"200 OK" in get(one)
        assert len(held) <= 4
        gate.set()
        data = b""
        while b"[DONE]" not in data:
            data += stream.recv(65536)


def test_a_reply_that_is_not_read_yet_is_not_cut_for_a_new_connection(serve: Serve) -> None:
    """The application has done its part, so the connection looked as if it waited."""
    server = serve(FakeCore(FILTERED, "x" * 50_000), max_connections=1)
    held = server.server.server_state.connections
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        wait_for(lambda: len(held) == 1)
        connection: Any = next(iter(held))
        kernel = connection.transport.get_extra_info("socket")
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.sendall(request_of({"model": MODEL, "prompt": "Hi"}))
        wait_for(lambda: connection.cycle is not None and connection.cycle.response_complete)
        assert connection.transport.get_write_buffer_size() > 0
        with server.connect() as late:
            assert b"too_many_connections" in late.recv(65536)
        data = b""
        while data.count(b"x") < 50_000:
            part = slow.recv(1 << 20)
            assert part, "cut"
            data += part


def test_stored_texts_count_by_the_memory_that_they_take(serve: Serve, key_file: str) -> None:
    """One emoji makes Python keep four bytes for each character: 3 MB for each MB that counted."""
    server = serve(FakeCore(), api_key_file=key_file, document_memory_bytes=4_000)
    for _ in range(3):
        assert store(server, ALICE, text="The river " * 120).status_code == 200
    text = "😀" + "The river " * 45  # four bytes for each character, and one more as UTF-8
    assert store(server, BOB, text=text).status_code == 200
    refused = store(server, BOB, text=text)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "document_memory_full")


def test_log_probabilities_of_several_requests_have_a_limit(serve: Serve) -> None:
    """Each request was bounded and their sum was not: 2 GB for each of them."""
    gate = threading.Event()
    server = serve(FakeCore(FILTERED, "a", gate), logprobs_memory_bytes=3 << 20)
    scored: dict[str, Any] = {
        "prompt": "Hi",
        "max_tokens": 900,
        "logprobs": 5,
    }  # 900 × 6 × 512 bytes
    with server.send(COMPLETIONS, **scored, stream=True) as first:
        assert b"200 OK" in first.recv(65536)
        refused = server.post(COMPLETIONS, **scored)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "logprobs_memory_full")
        assert int(refused.headers["retry-after"]) >= 1
        with server.send(COMPLETIONS, prompt="Hi", max_tokens=20, logprobs=5, stream=True) as few:
            wait_for(lambda: server.metrics()["num_requests_waiting"] == 1)
            gate.set()
            assert b"200 OK" in few.recv(65536)
    wait_for(lambda: server.post(COMPLETIONS, **scored).status_code == 200)
    alone: dict[str, Any] = {**scored, "n": 4}  # more than there is, and nobody else's
    wait_for(lambda: server.post(COMPLETIONS, **alone).status_code == 200)


class Recorded(subprocess.Popen[bytes]):
    """Remembers the processes that were started."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started.append(self)


def test_a_pdf_is_read_no_further_when_its_client_leaves(
    serve: Serve, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute of a processor for each, and the key's places, for clients that were long gone."""
    pytest.importorskip("pypdf", reason='"gemserve[pdf]" is not installed')
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    server = serve(FakeCore(), api_key_file=key_file)
    slow = pdf_of(["x"], content=b"BT /F1 12 Tf " + b"(a) Tj " * 3_000_000 + b"ET")
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n'
    form += slow + b"\r\n--x--\r\n"
    head = "POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n"
    head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(form)}\r\n\r\n"
    with ExitStack() as stack:
        for path in ("/v1/documents/text", DOCUMENTS, DOCUMENTS, DOCUMENTS):
            connection = stack.enter_context(server.connect())
            connection.sendall((head % path).encode() + form)
        wait_for(lambda: len(Recorded.started) == 2, PATIENCE_S)  # the others wait
    wait_for(lambda: all(each.returncode == -signal.SIGKILL for each in Recorded.started))
    files = {"file": ("b.pdf", pdf_of(["The code is 48213."]), "application/pdf")}
    reply = httpx.post(
        f"{server.url}/v1/documents/text", files=files, headers=ALICE, timeout=PATIENCE_S
    )
    assert reply.json()["text"] == "The code is 48213."
    assert len(Recorded.started) == 3, "those that waited are not read either"


def test_a_slow_reader_s_stream_ends_when_its_time_is_over(serve: Serve) -> None:
    """All that the engine had drawn by then was kept for it, for as long as it liked to read."""
    core = FakeCore(FILTERED, *["x" * 50_000] * 1000)
    server = serve(core, request_timeout_s=1, read_timeout_s=20)
    with server.send(COMPLETIONS, prompt="Hi", stream=True) as slow:
        num_bytes, end = 0, b""
        while part := slow.recv(100_000):
            num_bytes += len(part)
            end = (end + part)[-1000:]
            if b"[DONE]" in end:
                break
            time.sleep(0.02)
    assert b"longer than 1 s (--request-timeout)" in end
    assert num_bytes < 40_000_000, "the rest was sent, too"


def test_a_warm_up_counts_until_it_has_ended(serve: Serve, key_file: str) -> None:
    """The reply came at once and gave the place back, while the engine went on reading."""
    gate = threading.Event()
    core = FakeCore(FILTERED, gate)
    server = serve(core, api_key_file=key_file, concurrency_per_key=2)
    first, second = store(server, ALICE), store(server, ALICE)
    assert (first.status_code, second.status_code) == (200, 200)
    third = store(server, ALICE)
    assert third.status_code == 429
    assert third.json()["error"]["code"] == "concurrency_limit_exceeded"
    assert server.post(COMPLETIONS, headers=ALICE, prompt="Hi").status_code == 429
    assert store(server, BOB).status_code == 200
    gone = httpx.delete(f"{server.url}{DOCUMENTS}/{second.json()['id']}", headers=ALICE)
    assert gone.status_code == 200
    wait_for(lambda: store(server, ALICE).status_code == 200)  # it no longer runs
    gate.set()
    wait_for(lambda: server.metrics()["num_requests_running"] == 0)
    wait_for(lambda: store(server, ALICE, wait=True).status_code == 200)
