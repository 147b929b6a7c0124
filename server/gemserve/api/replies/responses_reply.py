"""The reply of /v1/responses in its plain text form: one answer, nothing stored, no tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count

from fastapi import Response as HttpResponse
from fastapi.responses import JSONResponse

from gemserve.api.access.request_id import new_id
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import (
    ABORTED,
    failure_body,
    failure_response,
    is_failure,
)
from gemserve.api.replies.response_types import (
    AnyEvent,
    OutputMessage,
    OutputText,
    Place,
    Response,
    ResponseUsage,
    Status,
)
from gemserve.api.replies.server_sent_events import KEEP_ALIVE, data_event, event_stream
from gemserve.api.replies.token_counts import filter_object, token_headers
from gemserve.api.requests.responses_body import ResponsesBody
from gemserve.types import Event, Filtered, FilterReport, Finished, SamplingParams, TextDelta


async def responses_reply(body: ResponsesBody, reader: EventReader) -> HttpResponse:
    (stream,) = reader.streams
    answer = _Answer(body, stream.request.sampling)
    if body.stream:
        return event_stream(_events(reader, answer))
    async with aclosing(reader.events()) as arrivals:
        async for _, event in arrivals:
            answer.add(event)
    finished = answer.finished or ABORTED
    if is_failure(finished) or answer.report is None:
        return failure_response(finished)
    return JSONResponse(answer.response, headers=token_headers([answer.report]))


class _Answer:
    """What is known of a response so far."""

    def __init__(self, body: ResponsesBody, sampling: SamplingParams) -> None:
        self.id, self.item_id = new_id("resp"), new_id("msg")
        self.text = ""
        self.report: FilterReport | None = None
        self.finished: Finished | None = None
        self._body, self._sampling = body, sampling
        self._created_s = int(time.time())

    def add(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, TextDelta):
            self.text += event.text
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def part(self) -> OutputText:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def item(self) -> OutputMessage:
        """The one message of the output."""
        return {
            "type": "message",
            "id": self.item_id,
            "status": self._status,
            "role": "assistant",
            "content": [self.part] if self.finished or self.text else [],
        }

    @property
    def response(self) -> Response:
        finished, report, body = self.finished, self.report, self._body
        is_cut = self._status == "incomplete"
        response: Response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": None,
            "service_tier": None,
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self.item] if finished else [],
            "usage": _usage(report, finished) if report and finished else None,
        }
        if report:
            response["filter"] = filter_object(report)
        return response

    @property
    def unfinished_response(self) -> Response:
        """The response as it was before its first event."""
        return {
            **self.response,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }

    def failed_response(self, finished: Finished) -> Response:
        message = failure_body(finished)["error"]["message"]
        return {
            **self.response,
            "status": "failed",
            "output": [],
            "error": {"code": "server_error", "message": message},
        }

    @property
    def _status(self) -> Status:
        if self.finished is None:
            return "in_progress"
        return "incomplete" if self.finished.reason == "length" else "completed"


async def _events(reader: EventReader, answer: _Answer) -> AsyncIterator[str]:
    """Server-sent events, numbered. The last one is response.completed, .incomplete or .failed."""
    numbers = count()
    is_created = False
    async with aclosing(reader.events_and_pauses()) as arrivals:
        async for arrival in arrivals:
            if arrival is None:
                yield KEEP_ALIVE
                continue
            _, event = arrival
            answer.add(event)
            if not is_created:
                is_created = True
                yield _line(
                    {
                        "type": "response.created",
                        "sequence_number": next(numbers),
                        "response": answer.unfinished_response,
                    }
                )
            for response_event in _response_events(event, answer, numbers):
                yield _line(response_event)


def _response_events(event: Event, answer: _Answer, numbers: Iterator[int]) -> Iterator[AnyEvent]:
    """What an event of the engine means to the client."""
    place: Place = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
    if isinstance(event, Filtered):
        yield {
            "type": "response.in_progress",
            "sequence_number": next(numbers),
            "response": answer.response,
        }
        yield {
            "type": "response.output_item.added",
            "sequence_number": next(numbers),
            "output_index": 0,
            "item": answer.item,
        }
        yield {
            "type": "response.content_part.added",
            "sequence_number": next(numbers),
            **place,
            "part": answer.part,
        }
    elif isinstance(event, TextDelta):
        if event.text:
            yield {
                "type": "response.output_text.delta",
                "sequence_number": next(numbers),
                **place,
                "delta": event.text,
                "logprobs": [],
            }
    elif isinstance(event, Finished):
        yield from _last_events(event, answer, place, numbers)


def _last_events(
    finished: Finished, answer: _Answer, place: Place, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    if is_failure(finished):
        yield {
            "type": "response.failed",
            "sequence_number": next(numbers),
            "response": answer.failed_response(finished),
        }
        return
    yield {
        "type": "response.output_text.done",
        "sequence_number": next(numbers),
        **place,
        "text": answer.text,
        "logprobs": [],
    }
    yield {
        "type": "response.content_part.done",
        "sequence_number": next(numbers),
        **place,
        "part": answer.part,
    }
    yield {
        "type": "response.output_item.done",
        "sequence_number": next(numbers),
        "output_index": 0,
        "item": answer.item,
    }
    is_cut = finished.reason == "length"
    yield {
        "type": "response.incomplete" if is_cut else "response.completed",
        "sequence_number": next(numbers),
        "response": answer.response,
    }


def _line(event: AnyEvent) -> str:
    return f"event: {event['type']}\n{data_event(event)}"


def _usage(report: FilterReport, finished: Finished) -> ResponseUsage:
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {"cached_tokens": report.cached_tokens},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + finished.completion_tokens,
    }
