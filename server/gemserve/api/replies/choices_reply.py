"""The reply of the two completion endpoints, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from fastapi import Response

from gemserve.api.access.request_id import new_id
from gemserve.api.replies.choice import ChoiceFormat, ChoiceT, PartT, ReplyChoice
from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import (
    NOT_BUILT,
    failure_body,
    failure_response,
    is_failure,
)
from gemserve.api.replies.large_replies import build, json_reply
from gemserve.api.replies.progress import ProgressReader, said_in_pause
from gemserve.api.replies.reply_types import (
    Chat,
    ChunkExtras,
    Completion,
    PromptIds,
    ReplyHead,
    Usage,
)
from gemserve.api.replies.server_sent_events import (
    DONE,
    data_event,
    event_stream_with,
)
from gemserve.api.replies.token_counts import (
    MAX_TOKENS_HEADER,
    answer_headers,
    filter_object,
    num_parts,
    usage_object,
)
from gemserve.api.requests.base_bodies import GenerationBody, StreamOptions
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.contract.events import Event, Filtered, Finished, PromptScored, TextDelta
from gemserve.contract.reports import FilterReport


async def choices_reply(
    body: GenerationBody,
    requests: EngineRequests,
    reader: EventReader,
    choice_format: ChoiceFormat[ChoiceT, PartT],
) -> Response:
    reply = _ChoicesReply(
        reader=reader,
        format=choice_format,
        head={
            "id": new_id(choice_format.id_prefix),
            "created": int(time.time()),
            "model": body.model,
        },
        choices=[
            ReplyChoice(
                index=index,
                echo=requests.echo_of(index),
                prompt_ids=stream.request.prompt_ids,
                returns_ids=requests.returns_ids,
                cites=body.filter is not None and body.filter.citations,
            )
            for index, stream in enumerate(reader.streams)
        ],
        n=requests.n,
        echoes_alone=requests.echoes_alone,
    )
    if not body.stream:
        return await reply.whole()
    options = body.stream_options or StreamOptions()
    progress = None
    if options.include_progress or body.return_progress:
        is_for_llama = bool(body.return_progress)
        progress = ProgressReader(reader, is_for_llama=is_for_llama)
    return await event_stream_with(
        reader,
        reply.chunks(options, progress),
        reply.headers,
        lambda: data_event(failure_body(NOT_BUILT)) + DONE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoicesReply(Generic[ChoiceT, PartT]):
    """A reply with `n` choices for each prompt. `echoes_alone`: without their answers."""

    reader: EventReader
    format: ChoiceFormat[ChoiceT, PartT]
    head: ReplyHead
    choices: Sequence[ReplyChoice]
    n: int
    echoes_alone: bool = False

    async def whole(self) -> Response:
        """All choices, or the error of the first one that fails, which ends the others."""
        finished: dict[int, ChoiceT] = {}
        async with aclosing(self.reader.events()) as arrivals:
            async for index, arrived in arrivals:
                choice, event = self.choices[index], self._shown(arrived)
                choice.add(event)
                if isinstance(event, Finished):
                    if is_failure(event):
                        return failure_response(event)
                    work = partial(self.format.choice, choice, event)
                    # choices end together: their sum would hold the event loop
                    num_chars = sum(choice.num_chars for choice in self.choices)
                    per_parsed = self.format.chars_per_parsed
                    num_parsed = num_chars // per_parsed if per_parsed else 0
                    finished[index] = await build(work, self._num_scored() + num_parsed)
        reports = self._reports()

        def content() -> Completion | Chat:
            return self.format.reply(
                self.head,
                [finished[choice.index] for choice in self.choices],
                self._usage(),
                [filter_object(report) for report in reports],
                self.choices[0].prompt_extras,
            )

        num_scored = self._num_scored() + sum(map(num_parts, reports))
        return await json_reply(content, self.headers(), num_scored)

    async def chunks(
        self, options: StreamOptions, progress: ProgressReader | None
    ) -> AsyncGenerator[str]:
        """Server-sent events. A choice's first chunk has its filter report; `[DONE]` comes once.

        `progress`: what comes at once and then in pauses, until the first token.
        """

        def chunk(
            choice: ReplyChoice,
            part: PartT,
            extras: ChunkExtras | None = None,
            *,
            prompt: PromptIds | None = None,
            num_scored: int = 0,
        ) -> str:
            usage: ChunkExtras = {"usage": None} if options.include_usage else {}
            if options.has_usage_everywhere:
                usage = {"usage": self._usage_of(choice)}
            content = self.format.chunk(
                self.head, [part], {**usage, **(extras or {})}, prompt or {}
            )
            return data_event(content, num_scored=num_scored)

        def first_chunk(choice: ReplyChoice, report: FilterReport, num_scored: int) -> str:
            return chunk(
                choice,
                self.format.first_part(choice),
                {"filter": filter_object(report)},
                prompt=choice.prompt_extras,
                num_scored=num_scored,
            )

        def prompt_chunk(choice: ReplyChoice, scored: PromptScored) -> str:
            part = self.format.prompt_part(choice, scored)
            return chunk(choice, part, num_scored=choice.num_scored)

        def idle_chunk() -> str:
            """Of a choice that goes on: comments do not reset the timers of some clients."""
            part = self.format.idle_part(going[0])
            usage: ChunkExtras = {"usage": None} if options.include_usage else {}
            return data_event(self.format.chunk(self.head, [part], usage, {}))

        going = list(self.choices)
        async with aclosing(self.reader.events_and_pauses()) as arrivals:
            async for arrival in arrivals:
                if arrival is None:
                    if extras := said_in_pause(progress):
                        yield data_event(self.format.chunk(self.head, [], extras, {}))
                    elif extras is not None:
                        yield idle_chunk()
                    continue
                choice, event = self.choices[arrival[0]], self._shown(arrival[1])
                choice.add(event)
                if isinstance(event, Filtered):
                    num_scored = choice.num_scored + num_parts(event.report)
                    work = partial(first_chunk, choice, event.report, num_scored)
                    yield await build(work, num_scored)
                elif isinstance(event, PromptScored):
                    yield await build(partial(prompt_chunk, choice, event), choice.num_scored)
                elif isinstance(event, TextDelta):
                    if progress is not None:
                        progress.stop()
                    if event.text or event.logprobs or choice.returns_ids:
                        yield chunk(choice, self.format.text_part(choice, event))
                elif is_failure(event):
                    yield data_event(failure_body(event))
                    yield DONE
                    return
                else:
                    going.remove(choice)
                    yield chunk(choice, self.format.last_part(choice, event))
        if options.include_usage:
            yield data_event(self.format.chunk(self.head, [], {"usage": self._usage()}, {}))
        yield DONE

    def _shown(self, event: Event) -> Event:
        """The event as the reply tells it."""
        if not self.echoes_alone:
            return event
        if isinstance(event, TextDelta):
            return replace(event, text="", token_ids=(), logprobs=())
        if isinstance(event, Finished) and not is_failure(event):
            return Finished(reason="length", completion_tokens=0)
        return event

    def headers(self) -> dict[str, str]:
        """The headers that say what was kept; none until it is known of every prompt."""
        reports = self._reports()
        if len(reports) * self.n < len(self.choices):
            return {}
        headers = answer_headers(reports, [stream.request for stream in self.reader.streams])
        return {**headers, MAX_TOKENS_HEADER: "0"} if self.echoes_alone else headers

    def _num_scored(self) -> int:
        return sum(choice.num_scored for choice in self.choices)

    def _reports(self) -> list[FilterReport]:
        """One for each prompt of which it is known, by any of its choices."""
        reports: list[FilterReport] = []
        for at in range(0, len(self.choices), self.n):
            known = (choice.report for choice in self.choices[at : at + self.n])
            reports += [report for report in known if report is not None][:1]
        return reports

    def _usage_of(self, choice: ReplyChoice) -> Usage:
        """The usage of one choice until now."""
        assert choice.report is not None  # it comes first
        return usage_object([choice.report], [choice])

    def _usage(self) -> Usage:
        """Each prompt counts once, however many choices it has."""
        return usage_object(self._reports(), self.choices)
