"""`POST /v1/responses` in its plain text form: one answer, nothing stored, no tools."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gemserve.api.replies.choices_reply import (
    KEEP_ALIVE,
    STREAM_HEADERS,
    Arrival,
    as_data,
    counts,
    failed,
    failure,
    is_failure,
    watched,
)
from gemserve.api.replies.completion_format import Json, filter_json
from gemserve.api.requests.request_builder import new_id
from gemserve.api.requests.responses_body import ResponsesBody
from gemserve.api.telemetry.server_metrics import RequestObserver
from gemserve.engine.engine import Stream
from gemserve.types import Filtered, FilterReport, Finished, TextDelta


async def reply_response(
    http: Request,
    body: ResponsesBody,
    stream: Stream,
    observer: RequestObserver,
    *,
    keep_alive_s: float,
    model: str,
) -> Response:
    """Answer `http` from `stream`. A client that goes away cancels it."""
    answer = _Answer(body, stream, model)
    if body.stream:
        arrivals = watched(http, [stream], [observer], keep_alive_s)
        return StreamingResponse(
            _events(arrivals, answer), media_type="text/event-stream", headers=STREAM_HEADERS
        )
    async with aclosing(watched(http, [stream], [observer], pause_s=None)) as arrivals:
        async for arrival in arrivals:
            assert arrival is not None
            answer.take(arrival)
    assert answer.finished is not None
    if is_failure(answer.finished) or answer.report is None:
        return failed(answer.finished)
    return JSONResponse(answer.response, headers=counts([answer.report]))


class _Answer:
    """A response, as far as its events have come."""

    def __init__(self, body: ResponsesBody, stream: Stream, model: str) -> None:
        sampling = stream.request.sampling
        self.id, self.item_id = new_id("resp"), new_id("msg")
        self.text = ""
        self.report: FilterReport | None = None
        self.finished: Finished | None = None
        self._fixed: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": None,
            "service_tier": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def take(self, arrival: Arrival) -> None:
        assert arrival is not None
        event = arrival[1]
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, TextDelta):
            self.text += event.text
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def opened(self) -> Json:
        """As it was before anything was known of its end."""
        undone: Json = {"output": [], "usage": None, "incomplete_details": None}
        return {**self.response, "status": "in_progress", **undone}

    @property
    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def item(self) -> Json:
        """The one message of the output."""
        content = [self.part] if self.finished or self.text else []
        return {
            "type": "message",
            "id": self.item_id,
            "status": self._status,
            "role": "assistant",
            "content": content,
        }

    @property
    def response(self) -> Json:
        finished, report = self.finished, self.report
        is_cut = self._status == "incomplete"
        return {
            **self._fixed,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self.item] if finished else [],
            "usage": _usage(report, finished) if report and finished else None,
            **({"filter": filter_json(report)} if report else {}),
        }

    def failed_response(self, finished: Finished) -> Json:
        message = failure(finished)["error"]["message"]
        error = {"code": "server_error", "message": message}
        return {**self.response, "status": "failed", "output": [], "error": error}

    @property
    def _status(self) -> str:
        if self.finished is None:
            return "in_progress"
        return "incomplete" if self.finished.reason == "length" else "completed"


async def _events(arrivals: AsyncGenerator[Arrival], answer: _Answer) -> AsyncIterator[str]:
    """Server-sent events, numbered; the last is response.completed, .incomplete or .failed."""
    number = 0

    def event(kind: str, content: Mapping[str, object]) -> str:
        nonlocal number
        data = as_data({"type": kind, "sequence_number": number, **content})
        number += 1
        return f"event: {kind}\n{data}"

    is_created = False
    place = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
    async with aclosing(arrivals):
        async for arrival in arrivals:
            if arrival is None:
                yield KEEP_ALIVE
                continue
            answer.take(arrival)
            happened = arrival[1]
            if not is_created:
                is_created = True
                yield event("response.created", {"response": answer.opened})
            if isinstance(happened, Filtered):
                yield event("response.in_progress", {"response": answer.response})
                yield event("response.output_item.added", {"output_index": 0, "item": answer.item})
                yield event("response.content_part.added", {**place, "part": answer.part})
            elif isinstance(happened, TextDelta):
                if happened.text:
                    delta = {**place, "delta": happened.text, "logprobs": []}
                    yield event("response.output_text.delta", delta)
            elif isinstance(happened, Finished) and is_failure(happened):
                yield event("response.failed", {"response": answer.failed_response(happened)})
            elif isinstance(happened, Finished):
                done = {**place, "text": answer.text, "logprobs": []}
                yield event("response.output_text.done", done)
                yield event("response.content_part.done", {**place, "part": answer.part})
                yield event("response.output_item.done", {"output_index": 0, "item": answer.item})
                response = answer.response
                yield event(f"response.{response['status']}", {"response": response})


def _usage(report: FilterReport, finished: Finished) -> Json:
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {"cached_tokens": report.cached_tokens},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + finished.completion_tokens,
    }
