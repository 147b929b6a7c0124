"""Builds large replies in a thread, so that the event loop goes on serving others meanwhile.

Log-probabilities make them large: 30,000 tokens with 20 alternatives each are 60 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from anyio import to_thread
from fastapi import Response

MAX_ON_LOOP = 200  # scored tokens; with 20 alternatives each they take 10 ms
T = TypeVar("T")


async def build(work: Callable[[], T], num_scored: int) -> T:
    """What `work` returns. `num_scored`: how many tokens' log-probabilities it writes."""
    if num_scored <= MAX_ON_LOOP:
        return work()
    return await to_thread.run_sync(work)


async def json_reply(
    content: Callable[[], Mapping[str, object]], headers: Mapping[str, str], num_scored: int
) -> Response:
    text = await build(lambda: to_json(content(), num_scored), num_scored)
    return Response(text, media_type="application/json", headers=dict(headers))


def to_json(content: Mapping[str, object], num_scored: int) -> str:
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if num_scored <= MAX_ON_LOOP:
        return encoder.encode(content)
    # piece by piece: `encode` would keep the interpreter lock until it is through
    return "".join(encoder.iterencode(content))
