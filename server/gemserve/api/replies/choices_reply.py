"""One reply from its choices' event streams: `stream` true or false, disconnects, keep-alive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gemserve.api.error_replies import error_body
from gemserve.api.replies.completion_format import Choice, Format, Json, filter_json, usage_json
from gemserve.api.requests.base_bodies import Generation
from gemserve.api.requests.engine_requests import Asked
from gemserve.api.requests.request_builder import new_id
from gemserve.api.telemetry.server_metrics import RequestObserver
from gemserve.engine.engine import Stream
from gemserve.types import Event, Filtered, FilterReport, Finished, PromptScored, TextDelta

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Arrival = tuple[int, Event] | None


async def reply(
    http: Request,
    body: Generation,
    asked: Asked,
    streams: Sequence[Stream],
    answer_format: Format,
    observers: Sequence[RequestObserver],
    *,
    keep_alive_s: float,
    model: str,
) -> Response:
    """Answer `http` from `streams`, one per choice. A client that goes away cancels them."""
    common: Json = {
        "id": new_id(answer_format.prefix),
        "created": int(time.time()),
        "model": model,
    }
    choices = [
        Choice(index=index, echo=asked.echo_of(index), first_token=stream.request.prompt_ids[0])
        for index, stream in enumerate(streams)
    ]
    if not body.stream:
        arrivals = watched(http, streams, observers, pause_s=None)
        return await _whole(arrivals, choices, asked, answer_format, common)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    arrivals = watched(http, streams, observers, keep_alive_s)
    return StreamingResponse(
        _chunks(arrivals, choices, asked, answer_format, common, include_usage),
        media_type="text/event-stream",
        headers=STREAM_HEADERS,
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
    async with aclosing(watched(http, [stream], [observer], pause_s=None)) as arrivals:
        async for arrival in arrivals:
            assert arrival is not None
            if isinstance(arrival[1], Filtered):
                report = arrival[1].report
            elif isinstance(arrival[1], Finished):
                finished = arrival[1]
    assert finished is not None
    if is_failure(finished) or report is None:
        return failed(finished)
    assert report.selection is not None
    ids = stream.request.prompt_ids
    kept = [ids[p] for start, stop in report.selection for p in range(start, stop)]
    shown = report if is_selection_shown else replace(report, selection=None)
    content = {
        "filter": filter_json(shown),
        "text": await to_thread.run_sync(decode, kept),
        "usage": usage_json(report.prompt_tokens, 0),
    }
    return JSONResponse(content, headers=counts([report]))


async def _whole(
    arrivals: AsyncGenerator[Arrival],
    choices: Sequence[Choice],
    asked: Asked,
    answer_format: Format,
    common: Json,
) -> JSONResponse:
    """All choices, or the error of the first that fails, which ends the others."""
    async with aclosing(arrivals):
        async for arrival in arrivals:
            assert arrival is not None
            index, event = arrival
            _take(choices[index], event)
            if isinstance(event, Finished) and is_failure(event):
                return failed(event)
    reports = _reports(choices, asked)
    shown = [filter_json(report) for report in reports]
    content = {
        **common,
        "object": answer_format.whole_object,
        "choices": [answer_format.whole(choice) for choice in choices],
        "usage": _usage(choices, reports),
        "filter": shown[0] if asked.is_one_prompt else shown,
    }
    return JSONResponse(content, headers=counts(reports))


async def _chunks(
    arrivals: AsyncGenerator[Arrival],
    choices: Sequence[Choice],
    asked: Asked,
    answer_format: Format,
    common: Json,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events. A choice's first chunk carries its filter report; `[DONE]` comes once."""
    slot: Json = {"usage": None} if include_usage else {}
    common = {**common, "object": answer_format.chunk_object}

    def chunk(entry: Json, **more: object) -> str:
        return as_data({**common, "choices": [entry], **slot, **more})

    async with aclosing(arrivals):
        async for arrival in arrivals:
            if arrival is None:
                yield KEEP_ALIVE
                continue
            choice, event = choices[arrival[0]], arrival[1]
            _take(choice, event)
            if isinstance(event, Filtered):
                yield chunk(answer_format.opening(choice), filter=filter_json(event.report))
            elif isinstance(event, PromptScored):
                yield chunk(answer_format.echo(choice))
            elif isinstance(event, TextDelta):
                if event.text or event.logprobs:
                    yield chunk(answer_format.delta(choice, event))
            elif is_failure(event):
                yield as_data(failure(event))
                yield DONE
                return
            else:
                yield chunk(answer_format.closing(choice))
    if include_usage:
        usage = _usage(choices, _reports(choices, asked))
        yield as_data({**common, "choices": [], "usage": usage})
    yield DONE


async def watched(
    http: Request,
    streams: Sequence[Stream],
    observers: Sequence[RequestObserver],
    pause_s: float | None,
) -> AsyncGenerator[Arrival]:
    """The streams' events as they come, observed; None wherever none came for `pause_s` seconds.

    Cancels the streams when the client goes or reading stops.
    """

    async def cancel_on_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        for stream in streams:
            stream.cancel()

    watcher = asyncio.create_task(cancel_on_disconnect())
    readers = [aiter(stream) for stream in streams]
    pending = {asyncio.ensure_future(anext(r)): index for index, r in enumerate(readers)}
    try:
        while pending:
            done, _ = await asyncio.wait(
                pending, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                # not raised: it would hold this frame, which holds the task that holds it, and so
                # keep the prompt and its adapter in memory until the collector runs
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                event = task.result()
                observers[index].see(event)
                pending[asyncio.ensure_future(anext(readers[index]))] = index
                yield index, event
    finally:
        watcher.cancel()
        for stream, observer in zip(streams, observers, strict=True):
            stream.cancel()
            observer.close()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _take(choice: Choice, event: Event) -> None:
    if isinstance(event, Filtered):
        choice.report = event.report
    elif isinstance(event, PromptScored):
        choice.scored = event
    elif isinstance(event, TextDelta):
        choice.text.append(event.text)
        choice.logprobs += event.logprobs
    else:
        choice.finished = event


def _reports(choices: Sequence[Choice], asked: Asked) -> list[FilterReport]:
    """One per prompt, whose choices have all finished well."""
    reports = [choice.report for choice in choices[:: asked.n]]
    return [report for report in reports if report is not None]


def _usage(choices: Sequence[Choice], reports: Sequence[FilterReport]) -> Json:
    """Each prompt counts once, however many choices it has."""
    finished = [choice.finished for choice in choices if choice.finished is not None]
    return usage_json(
        sum(report.prompt_tokens for report in reports),
        sum(event.completion_tokens for event in finished),
    )


def counts(reports: Sequence[FilterReport]) -> dict[str, str]:
    return {
        "X-Gemserve-Prompt-Tokens": str(sum(r.prompt_tokens for r in reports)),
        "X-Gemserve-Kept-Tokens": str(sum(r.kept_tokens for r in reports)),
    }


def is_failure(finished: Finished) -> bool:
    return finished.reason in ("error", "abort")


def failed(finished: Finished) -> JSONResponse:
    return JSONResponse(failure(finished), status_code=503 if finished.reason == "abort" else 500)


def failure(finished: Finished) -> Json:
    if finished.reason == "abort":
        return error_body("The request was cancelled.", kind="server_error", code="cancelled")
    return error_body(
        f"The request failed: {finished.error}", kind="server_error", code="engine_error"
    )


def as_data(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
