"""Hostile or merely large texts and replies: they cost nobody else more than their share."""

from __future__ import annotations

import json
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.requests import long_texts
from gemserve.prompting import encoding
from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, replace_file, serving_over, wait_for
from tests.served import PATIENCE_S, served

MIB = 1 << 20
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
EMOJI = "\N{GRINNING FACE}"
COUNT = "/v1/messages/count_tokens"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return replace_file(tmp_path / "keys", "alice", "bob")


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text[:300]
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize("path", ["/tokenize", COUNT])
def test_bytes_count_and_not_characters(tokenizer: Any, path: str) -> None:
    """A million emoji passed as a million characters, and became four million tokens."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        limit = long_texts.MOST_BYTES
        fields = {"messages": user(EMOJI * (limit // 4 + 1))}
        message = error_of(server.post(path, **fields))["message"]
        assert f"bytes as UTF-8, the limit of what is tokenized is {limit}" in message


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the texts with which the tokenizer is called."""
    lengths: list[int] = []
    real = encoding._encode

    def encode(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
        lengths.append(len(text))
        return real(backend, text, add_special_tokens=add_special_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "_encode", encode)
        yield lengths


@pytest.mark.parametrize("path", ["/tokenize", COMPLETIONS])
def test_a_text_is_read_no_further_than_to_its_limit(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Text that could not be used was tokenized to its end."""
    monkeypatch.setattr(long_texts, "MOST_TOKENS", 200_000)
    monkeypatch.setattr("gemserve.api.requests.request_builder.MOST_TOKENS", 200_000)
    with served(serving_over(FakeCore(), tokenizer, max_prompt_tokens=200_000)) as server:
        with counted_calls(monkeypatch) as lengths:
            reply = server.post(path, prompt=EMOJI * 900_000)
        assert "200000" in error_of(reply)["message"]
        assert sum(lengths) < 300_000


def test_a_text_that_cannot_be_cut_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for all of it could not be stopped, and took 600 bytes for each character."""
    # as if it were a single word whose tokens depend on where it begins
    monkeypatch.setattr(encoding._Piece, "joint", lambda *_: None)
    with served(serving_over(FakeCore(), tokenizer)) as server:
        with counted_calls(monkeypatch) as lengths:
            error = error_of(server.post("/tokenize", prompt="ab" * 500_000))
        assert error["code"] == "text_not_divisible"
        assert max(lengths) < encoding._MOST_PIECE_BYTES


def test_ids_beyond_the_limit_are_not_parsed(tokenizer: Any) -> None:
    """16 million ids took a gigabyte."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        most = long_texts.MOST_TOKENS
        many = b'{"tokens": [%s]}' % b",".join([b"300"] * (most + 1))
        for body in (many, many + b" " * (16 * most)):
            reply = httpx.post(f"{server.url}/detokenize", content=body, timeout=PATIENCE_S)
            error = error_of(reply)
            assert (error["code"], error["param"]) == ("body_too_large", "tokens")
            assert str(most) in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", COUNT, CHAT])
def test_work_on_a_text_ends_when_its_client_leaves(
    tokenizer: Any, key_file: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It went on to its end, and others waited for its turn."""
    real, begun = encoding._encode, threading.Event()

    def encode(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
        if len(text) > 1000:
            begun.set()
            time.sleep(0.05)
        return real(backend, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(encoding, "_encode", encode)
    limits = {"max_prompt_tokens": 4 * MIB, "context_tokens": 5 * MIB}
    serving = serving_over(FakeCore(FILTERED), tokenizer, api_key_file=key_file, **limits)
    monkeypatch.setattr(encoding, "_PIECE", 1 << 10)
    text = "The river runs past the houses. " * 120_000  # 3,750 pieces, three minutes
    with served(serving) as server:
        body = json.dumps({"model": "fake", "messages": user(text)}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            assert begun.wait(PATIENCE_S)
        wait_for(lambda: not threads_that_encode(), 30)


def threads_that_encode() -> list[int]:
    """The threads that are within `_encode_long`."""
    found = []
    for number, frame in sys._current_frames().items():
        at: Any = frame
        while at is not None:
            if at.f_code.co_name == "_encode_long":
                found.append(number)
                break
            at = at.f_back
    return found


def test_a_key_pays_for_what_is_only_tokenized(tokenizer: Any, key_file: str) -> None:
    """Tokenizing cost the quota nothing."""
    for path, fields in (
        ("/tokenize", {"prompt": "one two three four"}),
        ("/detokenize", {"tokens": [300] * 5}),
        (COUNT, {"messages": user("one two three four")}),
    ):
        serving = serving_over(FakeCore(), tokenizer, api_key_file=key_file, tokens_per_minute=4)
        with served(serving) as server:
            assert server.post(path, headers=ALICE, **fields).status_code == 200
            refused = server.post(path, headers=ALICE, **fields)
            assert refused.status_code == 429
            assert "4" in refused.json()["error"]["message"]
            assert server.post(path, headers=BOB, **fields).status_code == 200


def test_replies_share_a_memory(tokenizer: Any) -> None:
    """Echoes had no limit on their sum: a body of half a megabyte got 61 MB."""
    gate = threading.Event()
    core = FakeCore(FILTERED, "a", gate)
    text = "river " * 50_000  # 300,000 bytes, twice for each choice
    limits = {"max_prompt_tokens": 200_000, "context_tokens": 300_000}
    serving = serving_over(core, tokenizer, max_queue=16, reply_memory_bytes=2 * MIB, **limits)
    echo = {"prompt": text, "echo": True, "max_tokens": 1}
    with served(serving) as server, ExitStack() as stack:
        message = error_of(server.post(COMPLETIONS, n=8, **echo))["message"]
        assert "the limit is" in message
        stack.enter_context(server.send(COMPLETIONS, n=3, **echo))
        wait_for(lambda: server.serving.engine.num_running > 0, PATIENCE_S)
        error = error_of(server.post(COMPLETIONS, n=3, **echo), 503)
        assert (error["code"], error["type"]) == ("reply_memory_full", "overloaded_error")
        gate.set()


def test_a_large_reply_is_sent_in_slices(tokenizer: Any) -> None:
    """All of it was in the connection's buffer at once, for as long as it was not read."""
    text = "river " * 50_000
    limits = {"max_prompt_tokens": 200_000, "context_tokens": 300_000}
    serving = serving_over(FakeCore(FILTERED, "a"), tokenizer, max_queue=64, **limits)
    with served(serving) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        content = json.dumps(
            {"model": "fake", "prompt": text, "echo": True, "max_tokens": 1, "n": 32}
        ).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
        held = server.server.server_state.connections
        wait_for(lambda: len(held) == 1, PATIENCE_S)
        connection: Any = next(iter(held))
        slow.sendall(head.replace("Host: a", "Host: localhost").encode() + content)
        wait_for(lambda: connection.transport.get_write_buffer_size() > 0, PATIENCE_S)
        assert connection.transport.get_write_buffer_size() < MIB
        data = b""
        while b"\r\n\r\n" not in data:
            data += slow.recv(65536)
        header, _, rest = data.partition(b"\r\n\r\n")
        length = int(header.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        parts = [rest]
        while (left := length - sum(map(len, parts))) > 0:
            part = slow.recv(min(left, 1 << 20))
            assert part, "cut"
            parts.append(part)
        choices = json.loads(b"".join(parts))["choices"]
        assert [choice["text"] for choice in choices] == [text + "a"] * 32


def test_connections_leave_descriptors_for_replies(tmp_path: Path) -> None:
    """With few descriptors silent connections kept everybody out, and filled the log."""
    script = tmp_path / "few.py"
    script.write_text(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from gemserve.config import ServerConfig\n"
        "from gemserve.http_server.draining_server import http_server\n"
        "async def app(scope, receive, send):\n"
        "    if scope['type'] != 'http': return\n"
        "    await send({'type': 'http.response.start', 'status': 200,\n"
        "                'headers': [(b'content-length', b'2')]})\n"
        "    await send({'type': 'http.response.body', 'body': b'ok'})\n"
        "class Nothing:\n"
        "    has_ended = True\n"
        "    def drain(self, timeout_s): pass\n"
        "    def stop(self, timeout_s=0): pass\n"
        "http_server(app, Nothing(), ServerConfig(port=int(sys.argv[1])), lifespan='off').run()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [sys.executable, str(script), str(port)]
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/"
    try:
        wait_for(lambda: is_answered(url), PATIENCE_S)
        with ExitStack() as stack:
            for _ in range(90):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            for _ in range(4):
                assert is_answered(url)
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
    said = log.read_text()
    assert "is lowered to" in said
    assert len(said.splitlines()) < 30, said


def is_answered(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    """Most systems let a process have many, and give it 1,024 until it asks."""
    script = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "from gemserve.http_server.descriptors import raise_descriptor_limit;"
        "raise_descriptor_limit(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(said.stdout) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_a_stall_of_the_event_loop_is_seen(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What held up all clients could be found in tests only."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        server.metrics()

        def hold_up_the_loop() -> int:
            time.sleep(0.4)
            return 0

        engine = type(server.serving.engine)
        with caplog.at_level(logging.WARNING, "gemserve.api"), monkeypatch.context() as patch:
            patch.setattr(engine, "num_running", property(lambda _: hold_up_the_loop()))
            server.get("/load")
            wait_for(lambda: "hold_up_the_loop" in caplog.text, 20)
        stalled = server.metrics()["event_loop_longest_stall_seconds"]
        assert stalled > 0.3


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models"])
def test_head_is_answered_as_get_is(tokenizer: Any, path: str) -> None:
    """Load balancers probe with HEAD."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        reply = httpx.head(server.url + path, timeout=PATIENCE_S)
        assert (reply.status_code, reply.content) == (200, b"")


def test_a_config_beyond_any_model_is_refused_at_once(tmp_path: Path) -> None:
    """A config of 10**9 layers was loading for ever."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 10**9}))
    command = [sys.executable, "-m", "gemserve.cli.main", "serve", "--model", str(tmp_path)]
    command += ["--port", "99999"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert said.returncode != 0
    assert "num_hidden_layers=1000000000: the limit is 10000" in said.stdout + said.stderr
    assert "--port=99999" in said.stdout + said.stderr
