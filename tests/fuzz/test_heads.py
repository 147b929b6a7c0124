"""Requests as bytes, heads and all: complete replies, none a 500, and nothing without a key.

`corpus` keeps requests that once went wrong, here or in another server, and one of each kind that
does not. Every run sends them as they are. The random ones are these with changes.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.http_server import connections
from tests.fakes import FILTERED, FakeCore, replace_file, serving_over
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes
from tests.served import PATIENCE_S, Served, served

KEY = b"sk-fuzz"
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.http"))
HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*((?:\r\n[!-9;-~]+: [^\r\n\0]*)*)\r\n\r\n")
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)(?:\r\n|$)", re.IGNORECASE)
CHUNK = re.compile(rb"([0-9a-fA-F]+)\r\n")
PAUSE_S = 0.1  # without a byte, after which a complete reply counts as the last one
LIMIT_S = 20.0  # until a reply is complete or the connection ends

NAMES = st.sampled_from(
    [
        *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Authorization", b"X-Api-Key"),
        *(b"Connection", b"Expect", b"Upgrade", b"Content-Type", b"Content-Encoding", b"Cookie"),
        *(b"X-Request-Id", b"traceparent", b"tracestate", b"Origin", b"Range", b"Accept"),
        *(b"Access-Control-Request-Method", b"X-Forwarded-For", b"Forwarded", b"Trailer", b"TE"),
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"", b" ", b"0", b"-1", b"+5", b"0x10", b"5, 5", b"9" * 400, b"chunked", b"identity"),
            *(b"gzip, chunked", b"close", b"keep-alive", b"100-continue", b"h2c", b"websocket"),
            *(b"Bearer " + KEY, b"bearer", b"Basic c2s6", KEY, b"*", b"null", b"a\tb", b"\xff\xfe"),
            *(b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01", b"a%0d%0aX-Evil: 1", b"localhost"),
            *(b"application/json", b"multipart/form-data; boundary=", b"bytes=0-", b"x" * 70_000),
        ]
    ),
    st.binary(max_size=30),
)


@pytest.fixture(scope="module")
def errors() -> Iterator[list[str]]:
    """What any logger has said of the level ERROR or above."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    handler = Handler(logging.ERROR)
    logging.getLogger().addHandler(handler)
    yield said
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    key_file = replace_file(tmp_path_factory.mktemp("keys") / "keys", KEY.decode())
    serving = serving_over(
        FakeCore(FILTERED, "Hé", "llo"),
        tokenizer,
        max_queue=16,
        api_key_file=key_file,
        body_timeout_s=0.4,
        cors_origins=("https://page.example",),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_TIMEOUT_S", 0.4)
        with served(serving) as running:
            yield running


def replies_in(data: bytes, is_ended: bool) -> tuple[list[tuple[int, bytes, bytes]], bytes]:
    """(status, head, body) of every complete reply, and what follows these."""
    found = []
    while head := HEAD.match(data):
        status, rest = int(head[1]), data[head.end() :]
        length = LENGTH.search(head[2])
        if status < 200 or status in (204, 304):
            body = b""
        elif length is not None:
            body = rest[: int(length[1])]
            if len(body) < int(length[1]):
                break
        elif b"transfer-encoding: chunked" in head[2].lower():
            size = _chunked_bytes(rest)
            if size is None:
                break
            body = rest[:size]
        elif is_ended:
            body = rest
        else:
            break
        found.append((status, head[2], body))
        data = rest[len(body) :]
    return found, data


def _chunked_bytes(data: bytes) -> int | None:
    """The length of a body in chunks; None if it is not complete."""
    at = 0
    while size := CHUNK.match(data, at):
        at = size.end() + int(size[1], 16) + 2
        if int(size[1], 16) == 0:
            return at if at <= len(data) else None
    return None


def exchange(server: Served, sent: bytes) -> tuple[list[tuple[int, bytes, bytes]], bytes]:
    """What the server replies, and bytes that are no whole reply. It must end in time."""
    data, is_ended = b"", False
    with server.connect() as connection:
        with suppress(ConnectionError):  # it has heard enough
            connection.sendall(sent)
        connection.settimeout(PAUSE_S)
        ends_s = time.monotonic() + LIMIT_S
        while not is_ended:
            assert time.monotonic() < ends_s, f"no complete reply: {data[:300]!r}"
            try:
                part = connection.recv(1 << 16)
                data, is_ended = data + part, not part
            except TimeoutError:
                found, rest = replies_in(data, is_ended=False)
                if found and found[-1][0] >= 200 and not rest:
                    break
            except ConnectionError:
                is_ended = True
    return replies_in(data, is_ended)


def check(server: Served, errors: list[str], sent: bytes) -> None:
    with bounded("request", cpu_s=20, grown_bytes=300 * MIB):
        found, rest = exchange(server, sent)
    assert not rest.startswith(b"HTTP/1.1 200"), f"cut off: {rest[:300]!r}"
    assert not rest or rest.startswith(b"HTTP/1.1 "), f"no HTTP: {rest[:300]!r}"
    for status, head, body in found:
        assert status < 500 or status in (501, 503, 505), body[:500]
        assert b"\nx-evil" not in head.lower()
        assert len(body) < 5000 + 2 * len(sent) or status == 200, "an error repeats what was sent"
        if KEY not in sent:
            assert b'"choices"' not in body, "an answer without a key"
            assert b"doc-" not in body, "a document without a key"
    assert not errors, errors


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_every_kept_request_has_its_reply(server: Served, errors: list[str], path: Path) -> None:
    check(server, errors, path.read_bytes())


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A kept request with further headers, one header changed, or bytes changed anywhere."""
    content = draw(st.sampled_from(CORPUS)).read_bytes()
    head, mark, body = content.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for _ in range(draw(st.integers(0, 3))):
        line = draw(NAMES) + draw(st.sampled_from((b": ", b":", b" : ", b""))) + draw(VALUES)
        place = draw(st.integers(0, 1 << 16)) % len(lines)
        if draw(st.booleans()):
            lines.insert(place + 1, line)
        else:
            lines[place] = line if place else lines[0]
    made = b"\r\n".join(lines) + mark + body
    return draw(st.one_of(st.just(made), changed_bytes(made, hot=len(head) + 4)))


@given(requests())
@cases(60)
def test_every_changed_request_has_its_reply(
    server: Served, errors: list[str], sent: bytes
) -> None:
    check(server, errors, sent)


def test_nothing_is_left_after_all_of_them(server: Served, errors: list[str]) -> None:
    assert server.get("/health").status_code == 200
    text = server.get("/metrics", headers={"Authorization": f"Bearer {KEY.decode()}"}).text
    for name in ("num_requests_running", "num_requests_waiting"):
        assert re.search(rf"^gemserve_{name} 0.0$", text, re.MULTILINE), name
    assert not errors
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S):
        pass
