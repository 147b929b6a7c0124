"""Builds large replies in a thread, in slices, so that the event loop goes on serving others.

Log-probabilities make them large: 30,000 tokens with 20 alternatives each are 60 MB. So do echoed
prompts, and the texts and ids of the tokenizer's endpoints. What is large is also sent in slices,
each when the client has read most of those before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from anyio import to_thread
from fastapi import Response
from starlette.types import Receive, Scope, Send

from gemserve.prompting.stopping import check_stopped

MAX_ON_LOOP = 200  # scored tokens; with 20 alternatives each they take 10 ms
CHARS_PER_SCORED = 256  # of text, which take as long to write as one of them, or less
_SLICE = 64 << 10  # bytes, or characters
T = TypeVar("T")


class SlicedResponse(Response):
    """A reply that is sent in slices, and lets go of each that was sent."""

    def __init__(
        self,
        slices: list[bytes],
        headers: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> None:
        length = str(sum(map(len, slices)))
        super().__init__(None, headers={**(headers or {}), "content-length": length})
        self.headers["content-type"] = media_type
        self._slices = slices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        self._slices.reverse()
        while self._slices:
            data = self._slices.pop()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def build(work: Callable[[], T], num_scored: int) -> T:
    """What `work` returns. `num_scored`: how many tokens' log-probabilities it writes."""
    if num_scored <= MAX_ON_LOOP:
        return work()
    return await to_thread.run_sync(work)


async def json_reply(
    content: Callable[[], Mapping[str, object]], headers: Mapping[str, str], num_scored: int
) -> Response:
    if num_scored <= MAX_ON_LOOP:
        text = to_json(content(), num_scored)
        return Response(text, media_type="application/json", headers=dict(headers))
    slices = await to_thread.run_sync(lambda: encoded_slices(_json_parts(content())))
    return SlicedResponse(slices, headers)


def to_json(content: Mapping[str, object], num_scored: int) -> str:
    if num_scored <= MAX_ON_LOOP:
        return _ENCODER.encode(content)
    return "".join(_json_parts(content))


def encoded_slices(parts: Iterable[str]) -> list[bytes]:
    """The parts of a text as bytes, in slices of about the same size. It can be stopped."""
    slices: list[bytes] = []
    waiting: list[str] = []
    size = 0
    for part in parts:
        for at in range(0, len(part), _SLICE):
            waiting.append(part[at : at + _SLICE])
            size += len(waiting[-1])
            if size >= _SLICE:
                check_stopped()
                slices.append("".join(waiting).encode())
                waiting, size = [], 0
    return [*slices, "".join(waiting).encode()]


def _json_parts(content: Mapping[str, object]) -> Iterable[str]:
    # piece by piece: `encode` would keep the interpreter lock until it is through
    return _ENCODER.iterencode(content)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
