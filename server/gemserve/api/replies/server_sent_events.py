"""Server-sent events: the form in which replies are streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

from fastapi.responses import StreamingResponse

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"


def data_event(content: Mapping[str, object]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def named_event(content: Mapping[str, object]) -> str:
    """An event that is named by the `type` of its data."""
    return f"event: {content['type']}\n{data_event(content)}"


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
