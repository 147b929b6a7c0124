"""Requests in all the forms that RFC 9112 has servers accept, and what is said of the others."""

from __future__ import annotations

import gzip
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.test_connections import connect, head, served
from tests.fakes import COMPLETIONS, FILTERED, FakeCore

BODY = b'{"model": "fake", "prompt": "Hello"}'
STREAM = b'{"model": "fake", "prompt": "Hello", "stream": true}'
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
CLOSE = "Connection: close"
POST = f"POST {COMPLETIONS} HTTP/1.1"


@pytest.fixture(scope="module")
def port(tokenizer: Any) -> Iterator[int]:
    with served(FakeCore(), tokenizer) as (port, _):
        yield port


def request(line: str, *headers: str, body: bytes = b"", host: str = "localhost") -> bytes:
    lines = [line, f"Host: {host}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunks(*pieces: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    sent = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    return sent + b"0\r\n" + trailer + b"\r\n"


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def asked(port: int, data: bytes) -> tuple[list[int], bytes]:
    with connect(port) as held:
        held.sendall(data)
        told = all_of(held)
    return statuses(told), told


ABSOLUTE = (
    "http://localhost/v1/models",
    "HTTP://LOCALHOST:8000/v1/models?limit=1",
    "https://127.0.0.1/v1/models",
    "http://localhost",
    "http://localhost?a=b",
)
TAKEN: dict[str, bytes] = {
    **{target: request(f"GET {target} HTTP/1.1", CLOSE) for target in ABSOLUTE},
    "a post to an absolute target": request(
        f"POST http://localhost{COMPLETIONS} HTTP/1.1", LENGTH, CLOSE, body=BODY
    ),
    "the target's host counts": request(
        "GET http://localhost/v1/models HTTP/1.1", CLOSE, host="evil.example"
    ),
    "chunks": request(POST, CHUNKED, CLOSE, body=chunks(BODY[:5], BODY[5:])),
    "extensions": request(
        POST, CHUNKED, CLOSE, body=chunks(BODY[:5], BODY[5:], extension=b';a=b;c="d e"')
    ),
    "a trailer": request(
        POST, CHUNKED, "Trailer: X-Sum", CLOSE, body=chunks(BODY, trailer=b"X-Sum: 1\r\n")
    ),
    "capitals": request(POST, CHUNKED.upper(), CLOSE.upper(), body=chunks(BODY)),
    "zeros before a size": request(
        POST, CHUNKED, CLOSE, body=b"000%X\r\n%s\r\n000\r\n\r\n" % (len(BODY), BODY)
    ),
    "lower case": request(POST, LENGTH.lower(), CLOSE.lower(), body=BODY),
    "no blanks": request(POST, LENGTH.replace(" ", ""), CLOSE.replace(" ", ""), body=BODY),
    "more blanks": request(POST, f"Content-Length: \t{len(BODY)} \t", CLOSE, body=BODY),
    "one length twice": request(POST, LENGTH, LENGTH, CLOSE, body=BODY),
    "an empty line in front": b"\r\n" + request(POST, LENGTH, CLOSE, body=BODY),
    "empty lines in front": b"\r\n\n\r\n" + request(POST, LENGTH, CLOSE, body=BODY),
    "HTTP/1.0": request(f"POST {COMPLETIONS} HTTP/1.0", LENGTH, body=BODY),
    "HTTP/1.0 without a host": b"GET /v1/models HTTP/1.0\r\n\r\n",
    "a later minor version": request("GET /v1/models HTTP/1.2", CLOSE),
    "two slashes": request("GET //v1/models HTTP/1.1", CLOSE),
    "a slash at the end": request(f"POST /{COMPLETIONS}/ HTTP/1.1", LENGTH, CLOSE, body=BODY),
    "a letter in percents": request("GET /v1/%6dodels HTTP/1.1", CLOSE),
    "a body that nobody reads": request(
        "GET /v1/models HTTP/1.1", "Content-Length: 2", CLOSE, body=b"hi"
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_form_is_taken(port: int, name: str) -> None:
    """Absolute targets were not found, and an empty line in front of a request was an error."""
    assert asked(port, TAKEN[name])[0] == [200]


@pytest.mark.parametrize("expected", ["100-continue", "100-Continue"])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_client_that_waits_is_told_to_go_on(port: int, expected: str, encoding: str) -> None:
    body = BODY if encoding == "identity" else gzip.compress(BODY)
    headers = [f"Content-Length: {len(body)}", f"Content-Encoding: {encoding}", CLOSE]
    with connect(port) as held:
        held.sendall(request(POST, *headers, f"Expect: {expected}"))
        assert statuses(held.recv(65536)) == [100]
        held.sendall(body)
        assert statuses(all_of(held)) == [200]


def test_a_client_that_waits_to_no_end_is_refused_at_once(port: int) -> None:
    told, _ = asked(
        port, request("POST /v1/nothing HTTP/1.1", LENGTH, CLOSE, "Expect: 100-continue")
    )
    assert told == [404]


def test_requests_in_a_row_may_have_empty_lines_between_them(port: int) -> None:
    """The line that old clients send behind a body made the next request an error."""
    one = request(POST, LENGTH, body=BODY + b"\r\n")
    told, _ = asked(port, one + one + request("GET /v1/models HTTP/1.1", CLOSE))
    assert told == [200, 200, 200]


REFUSED: dict[str, tuple[bytes, int, bytes]] = {
    "a folded header": (request(POST, LENGTH, CLOSE, "X-A: a\r\n b", body=BODY), 400, b"folded"),
    "one folded by a tab": (request(POST, LENGTH, "X-A: a\r\n\tb", body=BODY), 400, b"folded"),
    "a blank folded line": (request(POST, LENGTH, "X-A: a\r\n ", body=BODY), 400, b"folded"),
    "a folded length": (request(POST, "Content-Length:\r\n 36", body=BODY), 400, b"folded"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, b"HTTP/2.0: this server speaks HTTP/1.1."),
    "a coding": (request(POST, "Transfer-Encoding: gzip, chunked"), 501, b"Transfer-Encoding"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, b"Missing mandatory Host: header."),
    "two hosts": (request("GET /health HTTP/1.1", "Host: a"), 400, b"multiple Host: headers."),
    "two lengths": (request(POST, LENGTH, "Content-Length: 3"), 400, b"Content-Length"),
    "a blank behind a name": (request(POST, "X-A : a"), 400, b"illegal header line."),
    "a size that is none": (request(POST, CHUNKED, body=b"zz\r\n"), 400, b"illegal chunk header."),
    "a user": (request("GET http://me@localhost/ HTTP/1.1"), 400, b"names a user"),
    "another host": (request("GET http://evil.example/ HTTP/1.1", CLOSE), 403, b"evil.example"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_request_is_said(port: int, name: str) -> None:
    data, status, said = REFUSED[name]
    told, reply = asked(port, data)
    assert told == [status]
    assert said in reply
    assert b"bytearray" not in reply


def test_a_line_that_may_have_a_key_is_not_repeated(port: int) -> None:
    data = request(POST, "Authorization : Bearer sk-secret", LENGTH, body=BODY)
    assert b"sk-secret" not in asked(port, data)[1]


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("stray", [[b"\r\n"], [b"\r\n", b"GET /health HTTP/1.1\r\n"], [b"x"]])
def test_bytes_behind_a_body_do_not_cut_its_stream(
    tokenizer: Any, close: bool, stray: Sequence[bytes]
) -> None:
    """An error was written into the midst of the stream, because of an empty line behind a body."""
    gate = threading.Event()
    headers = {"Content-Length": len(STREAM), **({"Connection": "close"} if close else {})}
    with served(FakeCore(FILTERED, "a", gate, "b"), tokenizer) as (port, _), connect(port) as held:
        held.sendall(head(**headers) + STREAM)
        data = held.recv(65536)
        for some in stray:
            held.sendall(some)
            time.sleep(0.05)  # so that they come one by one
        gate.set()
        while b"[DONE]" not in data:
            part = held.recv(65536)
            assert part, data
            data += part
    assert statuses(data) == [200]


def test_a_wrong_body_gets_no_second_reply(port: int) -> None:
    """Behind the 404 came a 400, which the client's next request would have got."""
    with connect(port) as held:
        held.sendall(head("/v1/nothing", **{"Transfer-Encoding": "chunked"}))
        data = held.recv(65536)
        held.sendall(b"zz\r\n")
        assert statuses(data + all_of(held)) == [404]
