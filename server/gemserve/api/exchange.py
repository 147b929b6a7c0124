"""One reply from one event stream: `stream` true or false, disconnects and keep-alive, once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace

from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gemserve.api.errors import error_body
from gemserve.api.formats import Format, Json, filter_json, usage_json
from gemserve.api.metrics import RequestObserver
from gemserve.api.prompts import new_id
from gemserve.api.schemas import Generation
from gemserve.engine.engine import Stream
from gemserve.types import Event, Filtered, FilterReport, Finished, TextDelta

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"


async def reply(
    http: Request,
    body: Generation,
    stream: Stream,
    answer_format: Format,
    observer: RequestObserver,
    *,
    keep_alive_s: float,
    model: str,
) -> Response:
    """Answer `http` from `stream`. A client that goes away cancels it."""
    common: Json = {
        "id": new_id(answer_format.prefix),
        "created": int(time.time()),
        "model": model,
    }
    events = _watched(http, stream, observer)
    if not body.stream:
        return await _whole(events, answer_format, common)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(
        _chunks(events, answer_format, common, include_usage, keep_alive_s),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def reply_selection(
    http: Request,
    stream: Stream,
    observer: RequestObserver,
    decode: Callable[[Sequence[int]], str],
    *,
    is_selection_shown: bool,
) -> Response:
    """Answer `http` with what a filter keeps of the stream's prompt, and its text."""
    report: FilterReport | None = None
    finished: Finished | None = None
    async for event in _watched(http, stream, observer):
        if isinstance(event, Filtered):
            report = event.report
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None
    if finished.reason in ("error", "abort") or report is None:
        return _failed(finished)
    assert report.selection is not None
    ids = stream.request.prompt_ids
    kept = [ids[p] for start, stop in report.selection for p in range(start, stop)]
    shown = report if is_selection_shown else replace(report, selection=None)
    content = {
        "filter": filter_json(shown),
        "text": await to_thread.run_sync(decode, kept),
        "usage": usage_json(report, 0),
    }
    return JSONResponse(content, headers=_counts(report))


async def _watched(
    http: Request, stream: Stream, observer: RequestObserver
) -> AsyncGenerator[Event]:
    """The stream's events, observed; cancels the stream when the client goes or reading stops."""

    async def cancel_on_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        stream.cancel()

    watcher = asyncio.create_task(cancel_on_disconnect())
    try:
        async for event in stream:
            observer.see(event)
            yield event
    finally:
        watcher.cancel()
        stream.cancel()
        observer.close()


async def _whole(events: AsyncIterator[Event], answer_format: Format, common: Json) -> JSONResponse:
    report: FilterReport | None = None
    text: list[str] = []
    finished: Finished | None = None
    async for event in events:
        if isinstance(event, Filtered):
            report = event.report
        elif isinstance(event, TextDelta):
            text.append(event.text)
        else:
            finished = event
    assert finished is not None
    if finished.reason in ("error", "abort") or report is None:
        return _failed(finished)
    content = {
        **common,
        **answer_format.whole("".join(text), finished.reason),
        "usage": usage_json(report, finished.completion_tokens),
        "filter": filter_json(report),
    }
    return JSONResponse(content, headers=_counts(report))


async def _chunks(
    events: AsyncGenerator[Event],
    answer_format: Format,
    common: Json,
    include_usage: bool,
    keep_alive_s: float,
) -> AsyncIterator[str]:
    """Server-sent events; the first data chunk carries the filter report, `[DONE]` comes once."""
    report: FilterReport | None = None
    usage_slot: Json = {"usage": None} if include_usage else {}
    async for event in _with_pauses(events, keep_alive_s):
        if event is None:
            yield KEEP_ALIVE
        elif isinstance(event, Filtered):
            report = event.report
            opening = {**common, **answer_format.opening(), **usage_slot}
            yield _data({**opening, "filter": filter_json(report)})
        elif isinstance(event, TextDelta):
            if event.text:
                yield _data({**common, **answer_format.delta(event.text), **usage_slot})
        elif event.reason in ("error", "abort") or report is None:
            yield _data(_failure(event))
        else:
            yield _data({**common, **answer_format.closing(event.reason), **usage_slot})
            if include_usage:
                empty = {**answer_format.closing(event.reason), "choices": []}
                usage = usage_json(report, event.completion_tokens)
                yield _data({**common, **empty, "usage": usage})
    yield DONE


async def _with_pauses(
    events: AsyncGenerator[Event], pause_s: float
) -> AsyncIterator[Event | None]:
    """The events, with None wherever none came for `pause_s` seconds."""
    pending: asyncio.Task[Event] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({pending}, timeout=pause_s)
            if not done:
                yield None
                continue
            task, pending = pending, None
            try:
                event = task.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()


def _counts(report: FilterReport) -> dict[str, str]:
    return {
        "X-Gemserve-Prompt-Tokens": str(report.prompt_tokens),
        "X-Gemserve-Kept-Tokens": str(report.kept_tokens),
    }


def _failed(finished: Finished) -> JSONResponse:
    return JSONResponse(_failure(finished), status_code=503 if finished.reason == "abort" else 500)


def _failure(finished: Finished) -> Json:
    if finished.reason == "abort":
        return error_body("The request was cancelled.", kind="server_error", code="cancelled")
    return error_body(
        f"The request failed: {finished.error}", kind="server_error", code="engine_error"
    )


def _data(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
