"""The reply of /v1/responses, whole or as a stream of events. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count

from fastapi import Response as HttpResponse

from gemserve.api.replies.answer_parts import AnswerChange, Part
from gemserve.api.replies.answer_reader import AnswerRules
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import ABORTED, failure_response, is_failure
from gemserve.api.replies.large_replies import build, json_reply
from gemserve.api.replies.logprobs import TokenTexts
from gemserve.api.replies.progress import ProgressReader, said_in_pause
from gemserve.api.replies.server_sent_events import (
    event_stream,
    event_stream_with,
    named_event,
    named_events,
)
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import ContextExceeded
from gemserve_dialects.openai_responses.body import OpenAIResponsesBody
from gemserve_dialects.openai_responses.reply_types import AnyEvent, CallPlace, Place, Response
from gemserve_dialects.openai_responses.response_object import ResponseInProgress
from gemserve_dialects.openai_responses.tools import CustomTool, FunctionTool


async def openai_responses_reply(
    body: OpenAIResponsesBody,
    reader: EventReader,
    rules: AnswerRules,
    vocabulary: TokenTexts,
) -> HttpResponse:
    (stream,) = reader.streams
    answer = ResponseInProgress(body, stream.request, rules, vocabulary)
    if body.stream:
        numbers = count()
        progress = ProgressReader(reader, is_for_llama=False) if body.has_progress else None
        return await event_stream_with(
            reader,
            _events(reader, answer, numbers, progress),
            answer.headers,
            lambda: named_event(_failure(answer.unbuilt_response(), numbers)),
        )
    await reader.read_to_end(answer.add)
    finished = answer.finished or ABORTED
    if is_failure(finished) or answer.report is None:
        return failure_response(finished)
    return await json_reply(lambda: answer.response, answer.headers(), answer.num_scored)


async def _events(
    reader: EventReader,
    answer: ResponseInProgress,
    numbers: Iterator[int],
    progress: ProgressReader | None,
) -> AsyncGenerator[str]:
    """Server-sent events, numbered. The last one is response.completed, .incomplete or .failed.

    In pauses come events that OpenAI's clients know, because they may fail at others, with the
    progress if it is wanted.
    """
    is_created = False
    async with aclosing(reader.events_and_pauses()) as arrivals:
        async for arrival in arrivals:
            extras = said_in_pause(progress) if arrival is None else None
            if arrival is None and extras is None:
                continue
            changes = [] if arrival is None else answer.add(arrival[1])
            if not is_created:
                is_created = True
                yield await build(partial(_created, answer, numbers), answer.num_scored)
            if arrival is None:
                yield named_event(
                    {
                        "type": "response.in_progress",
                        "sequence_number": next(numbers),
                        "response": answer.unfinished_response,
                        **(extras or {}),
                    }
                )
                continue
            event = arrival[1]
            if progress is not None and isinstance(event, TextDelta):
                progress.stop()
            # what ends has the log-probabilities of all of its tokens, and a response its filter
            is_large = isinstance(event, Filtered | Finished)
            is_large |= any(c.kind == "closed" for c in changes)
            num_scored = answer.num_scored if is_large else 0
            async for text in named_events(_written(event, changes, answer, numbers), num_scored):
                yield text


def _created(answer: ResponseInProgress, numbers: Iterator[int]) -> str:
    created: AnyEvent = {
        "type": "response.created",
        "sequence_number": next(numbers),
        "response": answer.unfinished_response,
    }
    return named_event(created, num_scored=answer.num_scored)


def _written(
    event: Event, changes: list[AnswerChange], answer: ResponseInProgress, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    """What an event of the engine means to the client."""
    if isinstance(event, Finished) and is_failure(event):
        yield _failure(answer.failed_response(event), numbers)
        return
    if isinstance(event, Filtered):
        yield {
            "type": "response.in_progress",
            "sequence_number": next(numbers),
            "response": answer.response,
        }
    for change in changes:
        if change.kind == "opened":
            yield from _opened(change.part, answer, numbers)
        elif change.kind == "grown":
            yield from _grown(change, answer, numbers)
        else:
            yield from _closed(change.part, answer, numbers)
    if isinstance(event, Finished):
        yield {
            "type": "response.incomplete" if event.reason == "length" else "response.completed",
            "sequence_number": next(numbers),
            "response": answer.response,
        }


def overflow_reply(
    body: OpenAIResponsesBody, error: ContextExceeded, vocabulary: TokenTexts
) -> HttpResponse:
    """The stream of a response whose input is too long.

    Codex shortens a conversation at this event, and gives up at a reply with status 400.
    """
    sampling = SamplingParams(
        max_tokens=body.max_output_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
    )
    nothing = Request(
        request_id="", prompt_ids=(), sampling=sampling, filter=FilterParams(method="none", keep=1)
    )
    answer = ResponseInProgress(body, nothing, AnswerRules(), vocabulary)
    created: AnyEvent = {
        "type": "response.created",
        "sequence_number": 0,
        "response": answer.unfinished_response,
    }
    failed: AnyEvent = {
        "type": "response.failed",
        "sequence_number": 1,
        "response": answer.response_with(
            {"code": "context_length_exceeded", "message": str(error)}
        ),
    }

    async def events() -> AsyncGenerator[str]:
        yield named_event(created)
        yield named_event(failed)

    return event_stream(events())


def _failure(response: Response, numbers: Iterator[int]) -> AnyEvent:
    return {
        "type": "response.failed",
        "sequence_number": next(numbers),
        "response": response,
    }


def _opened(part: Part, answer: ResponseInProgress, numbers: Iterator[int]) -> Iterator[AnyEvent]:
    yield {
        "type": "response.output_item.added",
        "sequence_number": next(numbers),
        "output_index": part.index,
        "item": answer.item(part, is_open=True),
    }
    if not part.is_call:
        yield {
            "type": "response.content_part.added",
            "sequence_number": next(numbers),
            **_place(part, answer),
            "part": answer.content_of(Part(part.index, kind=part.kind)),
        }


def _grown(
    change: AnswerChange, answer: ResponseInProgress, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    if change.part.is_call and answer.calls.kind(change.part) is not FunctionTool:
        return  # these are sent when they are whole
    if change.part.is_call:
        yield {
            "type": "response.function_call_arguments.delta",
            "sequence_number": next(numbers),
            **_call_place(change.part, answer),
            "delta": change.text,
        }
        return
    if change.part.is_thinking:
        yield {
            "type": "response.reasoning_text.delta",
            "sequence_number": next(numbers),
            **_place(change.part, answer),
            "delta": change.text,
        }
        return
    yield {
        "type": "response.output_text.delta",
        "sequence_number": next(numbers),
        **_place(change.part, answer),
        "delta": change.text,
        "logprobs": answer.scored(change.logprobs),
    }


def _closed(part: Part, answer: ResponseInProgress, numbers: Iterator[int]) -> Iterator[AnyEvent]:
    if part.is_call:
        yield from _closed_call(part, answer, numbers)
    else:
        yield from (_closed_text if part.is_text else _closed_thought)(part, answer, numbers)
        yield {
            "type": "response.content_part.done",
            "sequence_number": next(numbers),
            **_place(part, answer),
            "part": answer.content_of(part),
        }
    yield {
        "type": "response.output_item.done",
        "sequence_number": next(numbers),
        "output_index": part.index,
        "item": answer.item(part),
    }


def _closed_text(
    part: Part, answer: ResponseInProgress, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    text = answer.text_of(part)
    for index, annotation in enumerate(text["annotations"]):
        yield {
            "type": "response.output_text.annotation.added",
            "sequence_number": next(numbers),
            **_place(part, answer),
            "annotation_index": index,
            "annotation": annotation,
        }
    yield {
        "type": "response.output_text.done",
        "sequence_number": next(numbers),
        **_place(part, answer),
        "text": part.text,
        "logprobs": text["logprobs"],
    }


def _closed_thought(
    part: Part, answer: ResponseInProgress, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    yield {
        "type": "response.reasoning_text.done",
        "sequence_number": next(numbers),
        **_place(part, answer),
        "text": part.text,
    }


def _closed_call(
    part: Part, answer: ResponseInProgress, numbers: Iterator[int]
) -> Iterator[AnyEvent]:
    if answer.calls.kind(part) is FunctionTool:
        yield {
            "type": "response.function_call_arguments.done",
            "sequence_number": next(numbers),
            **_call_place(part, answer),
            "name": answer.calls.name(part),
            "arguments": part.text,
        }
    elif answer.calls.kind(part) is CustomTool:
        text = answer.calls.text_of(part)
        if text:
            yield {
                "type": "response.custom_tool_call_input.delta",
                "sequence_number": next(numbers),
                **_call_place(part, answer),
                "delta": text,
            }
        yield {
            "type": "response.custom_tool_call_input.done",
            "sequence_number": next(numbers),
            **_call_place(part, answer),
            "input": text,
        }


def _place(part: Part, answer: ResponseInProgress) -> Place:
    return {**_call_place(part, answer), "content_index": 0}


def _call_place(part: Part, answer: ResponseInProgress) -> CallPlace:
    return {"item_id": answer.item_id(part), "output_index": part.index}
