"""API keys and their limits over a socket: what the `openai` client raises, who frees a place."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import BODIES, CHAT, FILTERED, FakeCore, live_server, serving_over, wait_for

KEY = "sk-alice"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEY)
    return str(path)


def client_of(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10)


def ask(client: openai.OpenAI, prompt: str = "Hi") -> str:
    return client.completions.create(model="fake", prompt=prompt).choices[0].text


def test_errors_have_their_classes(core: FakeCore, tokenizer: Any, key_file: str) -> None:
    core.script = (FILTERED, "ok")
    serving = serving_over(core, tokenizer, api_key_file=key_file, requests_per_minute=1)
    with live_server(serving) as url, client_of(url) as good, client_of(url, "wrong") as bad:
        with pytest.raises(openai.AuthenticationError) as refused:
            bad.models.list()
        assert (refused.value.code, refused.value.type) == (
            "invalid_api_key",
            "invalid_request_error",
        )
        with pytest.raises(openai.AuthenticationError):  # not a broken pipe: the body is discarded
            ask(bad, "x" * 30_000_000)
        assert [m.id for m in good.models.list()] == ["fake"]
        assert ask(good) == "ok"
        with pytest.raises(openai.RateLimitError) as limited:
            ask(good, "x" * 30_000_000)
        assert limited.value.code == "rate_limit_exceeded"
        assert 50 <= int(limited.value.response.headers["retry-after"]) <= 60


def test_a_key_s_place_is_waited_for_by_the_client(
    core: FakeCore, tokenizer: Any, key_file: str
) -> None:
    """429 with Retry-After: the client waits, then succeeds."""
    gate = threading.Event()
    core.script = (FILTERED, gate, "ok")
    serving = serving_over(core, tokenizer, api_key_file=key_file, concurrency_per_key=1)
    with live_server(serving) as url, client_of(url) as client:
        thread = threading.Thread(target=ask, args=(client,))
        thread.start()
        wait_for(core.started.is_set)
        with pytest.raises(openai.RateLimitError) as limited:
            ask(client)
        assert limited.value.code == "concurrency_limit_exceeded"
        threading.Timer(0.1, gate.set).start()
        assert ask(client.with_options(max_retries=2)) == "ok"
        thread.join(5)


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("cut", [0, 5])
def test_a_dropped_request_frees_its_place(
    core: FakeCore,
    tokenizer: Any,
    key_file: str,
    connections: list[socket.socket],
    stream: bool,
    is_reset: bool,
    cut: int,
) -> None:
    """While it runs, and (`cut`) while its body still arrives."""
    core.script = (FILTERED, "one", threading.Event())
    serving = serving_over(core, tokenizer, api_key_file=key_file, concurrency_per_key=1)
    body = json.dumps({**BODIES[CHAT], "stream": stream}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with live_server(serving) as url, client_of(url) as client:
        connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5)
        connections.append(connection)
        connection.sendall(head.encode() + body[: len(body) - cut])
        wait_for(lambda: is_limited(client))
        if is_reset:  # a killed client: the kernel answers with RST instead of FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        core.script = (FILTERED, "fine")
        connection.close()
        wait_for(lambda: not is_limited(client), 2.0)
        assert ask(client) == "fine"


def is_limited(client: openai.OpenAI) -> bool:
    """Sends a request that is refused either way, and so runs nothing."""
    try:
        client.completions.create(model="other", prompt="Hi")
    except openai.RateLimitError:
        return True
    except openai.NotFoundError:
        return False
    raise AssertionError
