"""Streamed replies: server-sent events, or for Ollama's clients lines."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing

from fastapi.responses import Response, StreamingResponse

from gemserve.api.access.request_id import current_request_id
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import failure_response
from gemserve.api.replies.large_replies import MAX_ON_LOOP, build, to_json

log = logging.getLogger("gemserve.api")
EVENTS = "text/event-stream"
DONE = "data: [DONE]\n\n"
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in ("\u0085", "\u2028", "\u2029")}
NO_HEADERS: Mapping[str, str] = {}


def data_event(content: Mapping[str, object], *, num_scored: int = 0) -> str:
    """An event. `num_scored`: see `to_json`."""
    if num_scored > MAX_ON_LOOP:
        return f"data: {_as_line(to_json(content, num_scored))}\n\n"
    return f"data: {_as_line(json.dumps(content, ensure_ascii=False))}\n\n"


def _as_line(text: str) -> str:
    """JSON without the characters that end a line for some clients, and not in events."""
    if text.isascii():
        return text
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return text


def named_event(content: Mapping[str, object], *, num_scored: int = 0) -> str:
    """An event that is named by the `type` of its data. `num_scored`: see `to_json`."""
    return f"event: {content['type']}\n{data_event(content, num_scored=num_scored)}"


async def named_events(
    written: Iterator[Mapping[str, object]], num_scored: int
) -> AsyncGenerator[str]:
    """Each as a named event, large ones beside the event loop. `num_scored`: see `to_json`."""

    def following() -> str | None:
        content = next(written, None)
        return None if content is None else named_event(content, num_scored=num_scored)

    while (text := await build(following, num_scored)) is not None:
        yield text


def event_stream(
    events: AsyncIterator[str],
    headers: Mapping[str, str] = NO_HEADERS,
    media_type: str = EVENTS,
) -> StreamingResponse:
    return StreamingResponse(
        events,
        media_type=media_type,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
    )


async def event_stream_with(
    reader: EventReader,
    events: AsyncGenerator[str],
    headers: Callable[[], Mapping[str, str]],
    failure: Callable[[], str],
    media_type: str = EVENTS,
) -> Response:
    """A stream whose headers go out with its first event, and say what is known by then.

    Nothing comes later than otherwise: what a pause sends is an event, too. A request that fails
    before has the status of its failure. `failure`: the last event, if another cannot be built,
    which is logged and counted. `events`: made of what `reader` reads.
    """
    if (failed := await reader.early_failure()) is not None:
        return failure_response(failed)
    events = _until_failure(events, failure, reader.count_unbuilt)
    try:
        first = await anext(events)
        return event_stream(_resumed(first, events), headers(), media_type)
    except BaseException:
        await events.aclose()
        raise


async def _resumed(first: str, events: AsyncGenerator[str]) -> AsyncIterator[str]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _until_failure(
    events: AsyncGenerator[str], failure: Callable[[], str], count_failure: Callable[[], None]
) -> AsyncGenerator[str]:
    """Without this, a stream would end as if its connection had broken."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception:
            log.exception("request %s: its reply could not be built", current_request_id.get())
            count_failure()
            yield failure()
