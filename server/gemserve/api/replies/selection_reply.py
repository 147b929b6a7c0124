"""The reply of /v1/filter: what a filter keeps of a prompt, and its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from anyio import to_thread
from fastapi import Response

from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.failures import ABORTED, failure_response, is_failure
from gemserve.api.replies.large_replies import CHARS_PER_SCORED, json_reply
from gemserve.api.replies.reply_types import Selection
from gemserve.api.replies.token_counts import filter_object, num_parts, token_headers, usage_object
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.reports import FilterReport


async def selection_reply(
    reader: EventReader,
    decode: Callable[[Sequence[int]], str],
    *,
    shows_selection: bool,
) -> Response:
    """The reply, which has the ranges of the tokens kept only if `shows_selection` is true."""
    report: FilterReport | None = None
    kept: Sequence[int] | None = None
    finished = ABORTED
    async with aclosing(reader.events()) as arrivals:
        async for _, event in arrivals:
            if isinstance(event, Filtered):
                report, kept = event.report, event.ids
            elif isinstance(event, Finished):
                finished = event
    if is_failure(finished) or report is None or kept is None:
        return failure_response(finished)
    shown = report if shows_selection else replace(report, selection=None)
    text = await to_thread.run_sync(decode, kept)
    usage = usage_object([report], ())

    def content() -> Selection:
        return {"filter": filter_object(shown), "text": text, "usage": usage}

    num_scored = num_parts(shown) + len(text) // CHARS_PER_SCORED
    return await json_reply(content, token_headers([report]), num_scored)
