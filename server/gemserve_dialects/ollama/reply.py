"""The replies of /api/chat and /api/generate in Ollama's form, whole or as a stream of lines."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from gemserve.api.replies.answer_parts import AnswerChange, AnswerParts, Part
from gemserve.api.replies.answer_reader import AnswerRules
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import (
    ABORTED,
    NOT_BUILT,
    failure_body,
    failure_response,
    finish_reason,
    is_failure,
)
from gemserve.api.replies.large_replies import MAX_ON_LOOP, build, json_reply
from gemserve.api.replies.server_sent_events import event_stream_with
from gemserve.api.replies.token_counts import filter_object, num_parts, token_headers
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.reports import FilterReport
from gemserve_dialects.ollama.body import AnsweredBody, OllamaChatBody
from gemserve_dialects.ollama.errors import OllamaError
from gemserve_dialects.ollama.reply_types import Call, LineHead, Statistics

LINES = "application/x-ndjson"


async def ollama_reply(
    body: AnsweredBody, reader: EventReader, rules: AnswerRules, arrived_s: float
) -> Response:
    """The answer. `arrived_s`: when its request came (`time.monotonic()`)."""
    answer = _Answer(body, rules, arrived_s)
    if body.is_streamed:
        return await event_stream_with(
            reader,
            _lines(reader, answer),
            answer.headers,
            lambda: _failure_line(NOT_BUILT),
            media_type=LINES,
        )
    await reader.read_to_end(answer.add)
    finished = answer.finished or ABORTED
    if is_failure(finished) or answer.report is None:
        return failure_response(finished)
    return await json_reply(answer.whole, answer.headers(), answer.num_parts)


def loaded(body: AnsweredBody) -> Response:
    """The reply to a request without a prompt: one object, also where a stream was asked for."""
    reason = "unload" if body.unloads else "load"
    head = {"model": body.model, "created_at": timestamp(time.time()), "done": True}
    is_chat = isinstance(body, OllamaChatBody)
    said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return JSONResponse({**head, **said, "done_reason": reason})


class _Answer:
    """What is known of an answer so far."""

    def __init__(self, body: AnsweredBody, rules: AnswerRules, arrived_s: float) -> None:
        self.report: FilterReport | None = None
        self.finished: Finished | None = None
        self._model = body.model
        self._is_chat = isinstance(body, OllamaChatBody)
        self._parts = AnswerParts(rules)
        self._arrived_s = arrived_s
        self._began_s = self._first_s = self._last_s = arrived_s
        self._num_deltas = 0

    def add(self, event: Event) -> list[AnswerChange]:
        """Take an event; return what it changes of the answer."""
        if isinstance(event, TextDelta):
            if not self._num_deltas:
                self._first_s = event.drawn_s
            self._num_deltas += 1
            self._last_s = event.drawn_s
            return self._parts.push(event)
        if isinstance(event, Filtered):
            self.report = event.report
            self._began_s = event.started_s
            self._first_s = self._last_s = event.filtered_s
        elif isinstance(event, Finished):
            self.finished = event
            return self._parts.finish()
        return []

    def headers(self) -> dict[str, str]:
        """The headers that say what was kept; none until it is known."""
        return {} if self.report is None else token_headers([self.report])

    @property
    def num_parts(self) -> int:
        """See `num_parts` of reports."""
        return 0 if self.report is None else num_parts(self.report)

    def line(
        self,
        text: str = "",
        calls: list[Call] | None = None,
        *,
        thinking: str = "",
        is_last: bool = False,
    ) -> dict[str, Any]:
        """A line of a stream, which adds this to the answer."""
        return {**self._head(is_last), **self._content(text, thinking, calls or [])}

    def with_filter(self) -> dict[str, Any]:
        """A line that says what was kept of the prompt."""
        assert self.report is not None
        return {**self.line(), "filter": filter_object(self.report)}

    def last_line(self) -> dict[str, Any]:
        return {**self.line(is_last=True), **self._statistics()}

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        parts = self._parts.parts
        text = "".join(part.text for part in parts if part.is_text)
        thinking = "".join(part.text for part in parts if part.is_thinking)
        calls = [_call(part) for part in parts if part.is_call]
        return {
            **self.line(text, calls, thinking=thinking, is_last=True),
            **self._statistics(),
            "filter": self.with_filter()["filter"],
        }

    def _head(self, is_last: bool) -> LineHead:
        return {"model": self._model, "created_at": timestamp(time.time()), "done": is_last}

    def _content(self, text: str, thinking: str, calls: list[Call]) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **thought}
        said = {"role": "assistant", "content": text, **thought}
        return {"message": {**said, "tool_calls": calls} if calls else said}

    def _statistics(self) -> Statistics:
        assert self.finished is not None
        assert self.report is not None
        return {
            "done_reason": finish_reason(self.finished),
            "total_duration": _nanoseconds(time.monotonic() - self._arrived_s),
            "load_duration": _nanoseconds(self._began_s - self._arrived_s),
            "prompt_eval_count": self.report.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(self._first_s - self._began_s),
            "eval_count": self.finished.completion_tokens,
            "eval_duration": _nanoseconds(self._last_s - self._first_s),
        }


async def _lines(reader: EventReader, answer: _Answer) -> AsyncGenerator[str]:
    """The lines of a stream. The last one is done, or an error."""
    async with aclosing(reader.events_and_pauses()) as arrivals:
        async for arrival in arrivals:
            if arrival is None:  # clients parse every line, so one without text keeps it open
                yield _written(answer.line())
                continue
            _, event = arrival
            changes = answer.add(event)
            if isinstance(event, Filtered):
                yield await build(
                    lambda: _written(answer.with_filter(), answer.num_parts), answer.num_parts
                )
            if isinstance(event, Finished) and is_failure(event):
                yield _failure_line(event)
                return
            for content in _additions(changes, answer):
                yield _written(content)
            if isinstance(event, Finished):
                yield _written(answer.last_line())


def _additions(changes: list[AnswerChange], answer: _Answer) -> Iterator[dict[str, Any]]:
    """A text is sent as it comes, and a call once it is whole."""
    for change in changes:
        if change.part.is_text and change.kind == "grown":
            yield answer.line(change.text)
        elif change.part.is_thinking and change.kind == "grown":
            yield answer.line(thinking=change.text)
        elif change.part.is_call and change.kind == "closed":
            yield answer.line(calls=[_call(change.part)])


def _call(part: Part) -> Call:
    """A call. Arguments that were cut off are empty."""
    try:
        arguments = json.loads(part.text)
    except (ValueError, RecursionError):
        arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return {"id": part.call_id, "function": {"name": part.name, "arguments": arguments}}


def _failure_line(finished: Finished) -> str:
    error: OllamaError = {"error": failure_body(finished)["error"]["message"]}
    return _written(error)


def _written(content: Mapping[str, Any], num_parts: int = 0) -> str:
    """A line. One of many parts lets other threads run while it is written."""
    if num_parts > MAX_ON_LOOP:
        return f"{''.join(json.JSONEncoder().iterencode(content))}\n"
    return f"{json.dumps(content)}\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
