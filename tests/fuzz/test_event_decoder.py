"""The load test's reader of event streams: any bytes, in any pieces, from a server gone mad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from hypothesis import example, given
from hypothesis import strategies as st

from gemserve_client.load_test.streamed_request import Client, EventDecoder, Record
from gemserve_client.load_test.traffic import Job
from tests.fuzz.cases import JSON, TEXTS, bounded, cases, changed_json, written

FIELDS = st.sampled_from([b"data", b"event", b"id", b"retry", b"", b"dat", b"data "])
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])
LINES = st.one_of(
    st.just(b""),
    st.builds(lambda name, colon, value: name + colon + value, FIELDS,
              st.sampled_from([b":", b": ", b""]), st.binary(max_size=12)),
)  # fmt: skip
STREAMS = st.one_of(
    st.binary(max_size=200),
    st.lists(st.builds(bytes.__add__, LINES, ENDS), max_size=20).map(b"".join),
)


def read_whole(stream: bytes) -> list[str]:
    """The data of each event as the standard says it, all of the stream at once."""
    events: list[str] = []
    data: list[bytes] = []
    for line in [*stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), b""]:
        if line == b"" and data:
            events.append(b"\n".join(data).decode(errors="replace"))
            data = []
        elif line == b"data" or line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return events


def pieces(stream: bytes, cuts: list[int]) -> Iterator[bytes]:
    ends = sorted({cut % (len(stream) + 1) for cut in cuts} | {len(stream)})
    for start, end in zip([0, *ends], ends, strict=False):
        yield stream[start:end]


@given(STREAMS, st.lists(st.integers(0, 1 << 16), max_size=20))
@cases(100)
def test_pieces_make_no_difference(stream: bytes, cuts: list[int]) -> None:
    with bounded("event decoder", cpu_s=5):
        decoder = EventDecoder()
        found = [data for piece in pieces(stream, cuts) for data in decoder.feed(piece)]
        found.extend(decoder.close())
        assert found == read_whole(stream)


def text_of(value: Any) -> str:
    return written(value).decode("utf-8", "replace")


CHUNK = {
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    "filter": {"kept_tokens": 3, "applied": True, "reason": "short_prompt"},
}
EVENTS = st.one_of(
    changed_json(CHUNK).map(text_of),
    changed_json({"error": {"message": "no", "type": "server_error"}}).map(text_of),
    JSON.map(text_of),
    TEXTS,
    st.just("[DONE]"),
)


class Body(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


async def send(parts: list[bytes], status: int, chat: bool) -> Record:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, stream=Body(parts)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        record = Record(index=0)
        client = Client(http, chat=chat, timeout_s=60, fields={})
        await client.send(Job(index=0, prompt="Hi", max_tokens=3), record, 0.0)
        return record


@example(["[" * 5000], 200, True)
@example(["[" * 5000], 500, True)
@example(['{"usage": {"prompt_tokens": "3", "completion_tokens": [1]}}', "[DONE]"], 200, True)
@example(
    ['{"choices": [{"text": "a"}]}', f'{{"usage": {{"completion_tokens": 1{"0" * 400}}}}}'],
    200,
    False,
)
@example(['{"filter": {"kept_tokens": 1.5, "applied": "no"}}', "[DONE]"], 200, True)
@given(st.lists(EVENTS, max_size=5), st.sampled_from([200, 200, 200, 400, 500]), st.booleans())
@cases(30)
def test_any_stream_is_an_answer_or_a_named_error(
    events: list[str], status: int, chat: bool
) -> None:
    """A load test must not end because one reply of thousands was strange."""
    parts = [f"data: {event}\n\n".encode("utf-8", "replace") for event in events]
    with bounded("event stream", cpu_s=5):
        record = asyncio.run(send(parts, status, chat))
    known = ("server_error", "truncated", "malformed", "empty", f"http_{status}", None)
    assert record.error in known
    assert len(record.message) <= 300
    for number in (record.prompt_tokens, record.kept_tokens, record.output_tokens):
        assert number is None or isinstance(number, int)
    assert record.finish_reason is None or isinstance(record.finish_reason, str)
    _: Any = record.tpot_s
