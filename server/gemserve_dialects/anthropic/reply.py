"""The reply of /v1/messages in Anthropic's form, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from anyio import to_thread
from fastapi import Response

from gemserve.api.access.request_id import new_id
from gemserve.api.replies.answer_parts import AnswerChange, AnswerParts, Part
from gemserve.api.replies.answer_reader import AnswerRules
from gemserve.api.replies.call_arguments import parse_arguments
from gemserve.api.replies.citations import Citation, char_locations, citations_of
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import (
    ABORTED,
    NOT_BUILT,
    failure_body,
    failure_response,
    is_failure,
)
from gemserve.api.replies.large_replies import json_reply
from gemserve.api.replies.progress import ProgressReader, said_in_pause
from gemserve.api.replies.server_sent_events import event_stream_with, named_event, named_events
from gemserve.api.replies.token_counts import (
    answer_headers,
    cached_tokens_of,
    filter_object,
    num_parts,
)
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve_dialects.anthropic.body import AnthropicBody
from gemserve_dialects.anthropic.errors import anthropic_error
from gemserve_dialects.anthropic.reply_types import (
    AnyEvent,
    ContentBlock,
    Message,
    MessageDelta,
    MessageUsage,
    StopReason,
)


async def anthropic_reply(
    body: AnthropicBody,
    reader: EventReader,
    rules: AnswerRules,
    request_id: str,
    decode: Callable[[Sequence[int]], str],
) -> Response:
    """`decode`: the text of tokens, to find what was kept of documents."""
    (stream,) = reader.streams
    answer = _MessageInProgress(body, stream.request, rules)
    find_citations = partial(answer.find_citations, decode)
    if body.stream:
        progress = ProgressReader(reader, is_for_llama=False) if body.has_progress else None
        return await event_stream_with(
            reader,
            _events(reader, answer, request_id, progress, find_citations),
            answer.headers,
            lambda: _failure_event(NOT_BUILT, request_id),
        )
    await reader.read_to_end(answer.add)
    finished = answer.finished or ABORTED
    if is_failure(finished) or answer.report is None:
        return failure_response(finished)
    if answer.cites:
        await to_thread.run_sync(find_citations)
    return await json_reply(lambda: answer.message, answer.headers(), answer.num_parts)


class _MessageInProgress:
    """What is known of a message so far."""

    def __init__(self, body: AnthropicBody, request: Request, rules: AnswerRules) -> None:
        self.report: FilterReport | None = None
        self.finished: Finished | None = None
        self._id = new_id("msg").replace("-", "_")
        self._model, self._request = body.model, request
        self.has_context_management = body.context_management is not None
        self._documents = body.cited_documents
        self._cites_libraries = body.filter is not None and body.filter.citations
        self._shows_selection = body.filter is not None and body.filter.return_selection
        self.citations: list[Citation] = []
        self._parts = AnswerParts(rules)

    def add(self, event: Event) -> list[AnswerChange]:
        """Take an event; return what it changes of the content."""
        if isinstance(event, TextDelta):
            return self._parts.push(event)
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, Finished):
            self.finished = event
            return self._parts.finish()
        return []

    @property
    def cites(self) -> bool:
        """Does the message say where it comes from?"""
        return self._cites_libraries or bool(self._documents)

    def find_citations(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Find what the message cites, once its report is there. Runs off the event loop."""
        report = self.report
        if report is None or not self.cites:
            return
        ids, kept = self._request.prompt_ids, report.selection or ()
        locations = char_locations(self._documents, ids, kept, decode) if self._documents else ()
        sources = report.sources if self._cites_libraries else None
        self.citations = [*citations_of(sources, locations)]

    def block(self, part: Part, *, is_open: bool = False) -> ContentBlock:
        """A part as a block of the content. An open block is as it was when it was opened."""
        block = _block(part, is_open=is_open)
        if self.cites and block["type"] == "text":
            block["citations"] = [] if is_open else self.citations
        return block

    def headers(self) -> dict[str, str]:
        """The headers that say what was kept; none until it is known."""
        return answer_headers([] if self.report is None else [self.report], [self._request])

    @property
    def num_parts(self) -> int:
        """See `num_parts` of reports."""
        return 0 if self.report is None else num_parts(self._shown(self.report))

    def _shown(self, report: FilterReport) -> FilterReport:
        return report if self._shows_selection else replace(report, selection=None)

    @property
    def message(self) -> Message:
        """The message with all that is known. Its content is there once it is whole."""
        finished = self.finished
        message: Message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self.block(part) for part in self._parts.parts] if finished else [],
            "stop_reason": self.stop_reason if finished else None,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage,
            "max_tokens": self._request.sampling.max_tokens,
        }
        if self.has_context_management:
            message["context_management"] = {"applied_edits": []}
        if self.report is not None:
            message["filter"] = filter_object(self._shown(self.report))
        return message

    @property
    def stop_reason(self) -> StopReason:
        """Of an answer that is whole."""
        if self.finished is not None and self.finished.reason == "length":
            return "max_tokens"
        if self._parts.has_calls:
            return "tool_use"
        return "end_turn" if self.stop_sequence is None else "stop_sequence"

    @property
    def stop_sequence(self) -> str | None:
        return None if self.finished is None else self.finished.stop

    @property
    def usage(self) -> MessageUsage:
        report = self.report
        prompt_tokens = 0 if report is None else report.prompt_tokens
        cached_tokens = 0 if report is None else cached_tokens_of(report)
        return {
            "input_tokens": prompt_tokens - cached_tokens,
            "output_tokens": 0 if self.finished is None else self.finished.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
        }


async def _events(
    reader: EventReader,
    answer: _MessageInProgress,
    request_id: str,
    progress: ProgressReader | None,
    find_citations: Callable[[], None],
) -> AsyncGenerator[str]:
    """Server-sent events. The last one is message_stop or error."""
    async with aclosing(reader.events_and_pauses()) as arrivals:
        async for arrival in arrivals:
            if arrival is None:
                if sent := _in_pause(progress):
                    yield sent
                continue
            _, event = arrival
            if progress is not None and isinstance(event, TextDelta):
                progress.stop()
            changes = answer.add(event)
            if isinstance(event, Filtered) and answer.cites:
                await to_thread.run_sync(find_citations)
            if isinstance(event, Finished) and is_failure(event):
                yield _failure_event(event, request_id)
                return
            num_scored = answer.num_parts if isinstance(event, Filtered) else 0
            async for text in named_events(_written(event, changes, answer), num_scored):
                yield text


def _failure_event(finished: Finished, request_id: str) -> str:
    message = failure_body(finished)["error"]["message"]
    error = anthropic_error(
        message, status=500, request_id=request_id, is_overloaded=finished.late == "not_begun"
    )
    return named_event(error)


def _in_pause(progress: ProgressReader | None) -> str:
    """What is sent in a pause; empty if that is nothing.

    Every client knows `ping`, and Anthropic's skip it whatever is in it.
    """
    extras = said_in_pause(progress)
    return "" if extras is None else named_event({"type": "ping", **extras})


def _written(
    event: Event, changes: list[AnswerChange], answer: _MessageInProgress
) -> Iterator[AnyEvent]:
    """What an event of the engine means to the client."""
    if isinstance(event, Filtered):
        yield {"type": "message_start", "message": answer.message}
    for change in changes:
        if change.kind == "closed" and change.part.is_text:
            for citation in answer.citations:
                yield {
                    "type": "content_block_delta",
                    "index": change.part.index,
                    "delta": {"type": "citations_delta", "citation": citation},
                }
        yield _of_change(change, answer)
    if isinstance(event, Finished):
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence},
            "usage": answer.usage,
        }
        if answer.has_context_management:
            delta["context_management"] = {"applied_edits": []}
        yield delta
        yield {"type": "message_stop"}


def _of_change(change: AnswerChange, answer: _MessageInProgress) -> AnyEvent:
    index = change.part.index
    if change.kind == "opened":
        return {
            "type": "content_block_start",
            "index": index,
            "content_block": answer.block(change.part, is_open=True),
        }
    if change.kind == "closed":
        return {"type": "content_block_stop", "index": index}
    if change.part.is_call:
        return {
            "type": "content_block_delta",
            "index": index,
            "delta": {"type": "input_json_delta", "partial_json": change.text},
        }
    if change.part.is_thinking:
        return {
            "type": "content_block_delta",
            "index": index,
            "delta": {"type": "thinking_delta", "thinking": change.text},
        }
    return {
        "type": "content_block_delta",
        "index": index,
        "delta": {"type": "text_delta", "text": change.text},
    }


def _block(part: Part, *, is_open: bool) -> ContentBlock:
    if part.is_text:
        return {"type": "text", "text": "" if is_open else part.text}
    if part.is_thinking:
        return {"type": "thinking", "thinking": "" if is_open else part.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": f"toolu_{part.call_id.removeprefix('call_')}",
        "name": part.name,
        "input": {} if is_open else parse_arguments(part.text),
    }
