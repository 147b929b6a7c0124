"""Bodies that are compressed or begin with a byte order mark, and paths with too many slashes."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gemserve.api.access.body_limit import BodyLimit
from gemserve.api.access.content_encoding import MOST_EMPTY, PIECE_BYTES, Decoder, decoder_of
from gemserve.api.routes.submission import read_body
from tests.fakes import Api

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.anyio
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello 🌍"}]}
BODY = json.dumps(CHAT).encode()
PATH = "/v1/chat/completions"


def deflated(data: bytes) -> bytes:
    """Without zlib's header, as some old clients send it."""
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


ENCODED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "its old name": ("x-gzip", gzip.compress),
    "in capitals": ("GZip", gzip.compress),
    "two members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflated),
    "zstd": ("zstd", zstd.compress),
    "two frames": ("zstd", lambda data: zstd.compress(data[:9]) + zstd.compress(data[9:])),
    "empty members": ("gzip", lambda data: gzip.compress(b"") * 3 + gzip.compress(data)),
    "empty frames": ("zstd", lambda data: zstd.compress(b"") * 3 + zstd.compress(data)),
    "identity": ("identity", bytes),
    "identity and gzip": ("identity, gzip", gzip.compress),
}


@pytest.mark.parametrize("name", ENCODED)
async def test_a_compressed_body_is_read(api: Api, name: str) -> None:
    encoding, encode = ENCODED[name]
    headers = {"Content-Encoding": encoding}
    reply = await api.client.post(PATH, content=encode(BODY), headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "compress", "aws-chunked"])
async def test_another_encoding_is_named(api: Api, encoding: str) -> None:
    """Plain JSON with such a header was read as if it had none."""
    reply = await api.client.post(PATH, content=BODY, headers={"Content-Encoding": encoding})
    assert reply.status_code == 415
    assert reply.headers["Accept-Encoding"] == "gzip, deflate, zstd"
    assert encoding in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
async def test_each_protocol_says_it_in_its_own_form(api: Api, path: str) -> None:
    said = await api.client.post(path, content=BODY, headers={"Content-Encoding": "br"})
    assert said.status_code == 415
    assert "Content-Encoding" in json.dumps(said.json()["error"])


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", ["cut off", "empty", "other bytes", "plain"])
async def test_a_broken_encoding_is_an_error(api: Api, name: str, cut: str) -> None:
    encoded = ENCODED[name][1](BODY)
    bodies = {
        "cut off": encoded[:-9],
        "empty": b"",
        "other bytes": encoded[:20] + b"\xff" * 20 + encoded[40:],
        "plain": BODY,
    }
    headers = {"Content-Encoding": ENCODED[name][0]}
    reply = await api.client.post(PATH, content=bodies[cut], headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] in ("invalid_encoding", "invalid_json")


@pytest.mark.parametrize("name", ["gzip", "deflate", "raw deflate", "zstd"])
async def test_a_bomb_is_decoded_up_to_the_limit_only(api: Api, name: str) -> None:
    encoding, encode = ENCODED[name]
    bomb = encode(b" " * (200 << 20))
    assert len(bomb) < 1 << 20
    reply = await api.client.post(PATH, content=bomb, headers={"Content-Encoding": encoding})
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("name", ["gzip", "two members", "raw deflate", "zstd", "two frames"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_of_any_size_make_the_whole(name: str, size: int) -> None:
    encoding, encode = ENCODED[name]
    text = bytes(range(256)) * 3000
    encoded = encode(text)
    decoder = decoder_of([(b"content-encoding", encoding.lower().encode())])
    assert decoder is not None
    made = b"".join(_decoded(decoder, encoded, size))
    assert made == text
    assert decoder.is_whole


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_empty_members_are_not_kept(name: str) -> None:
    """They stayed in memory, where nothing counted them, and all of them were copied each time."""
    decoder = decoder_of([(b"content-encoding", name.encode())])
    assert decoder is not None
    decoder.push(ENCODED[name][1](b"") * (MOST_EMPTY - 1))
    assert decoder.pull() == b""
    assert decoder.is_whole
    decoder.push(ENCODED[name][1](b"") * (2 * MOST_EMPTY))
    with pytest.raises(ValueError, match="in a row"):
        decoder.pull()


async def test_others_have_their_turn_while_a_bomb_is_decoded() -> None:
    """64 MiB, of which 2 KB came, were one step of the event loop."""
    pieces = [zstd.compress(b" " * (64 << 20))]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(), "more_body": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(Request(scope, receive))

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    task = asyncio.create_task(others())
    scope = {"type": "http", "headers": [(b"content-encoding", b"zstd")]}
    await BodyLimit(app, 64 << 20)(scope, receive, send)
    task.cancel()
    assert turns > 100


async def test_nothing_keeps_a_body_that_was_read() -> None:
    """Padding of 64 MiB stayed in memory until the reply had ended, and counted nowhere."""

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    http = Request({"type": "http", "headers": []}, receive)
    assert await read_body(http) == BODY
    assert BODY not in vars(http).values()


def _decoded(decoder: Decoder, encoded: bytes, size: int) -> list[bytes]:
    pieces = []
    for start in range(0, len(encoded), size):
        decoder.push(encoded[start : start + size])
        while piece := decoder.pull():
            assert len(piece) <= PIECE_BYTES
            pieces.append(piece)
    return pieces


async def test_a_byte_order_mark_counts_for_nothing(api: Api) -> None:
    reply = await api.client.post(PATH, content=b"\xef\xbb\xbf" + BODY)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1//chat/completions"),
        ("POST", "/v1/chat///completions//"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/models//fake"),
        ("GET", "/health/"),
    ],
)
async def test_slashes_too_many_count_for_nothing(api: Api, method: str, path: str) -> None:
    content = BODY if method == "POST" else None
    reply = await api.client.request(method, path, content=content)
    assert reply.status_code == 200, reply.text
