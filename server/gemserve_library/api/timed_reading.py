"""Reads what a search has found, the best first, until a time is over.

Each candidate is read by a request of its own, which leaves it in the document cache. So the
request that answers finds all that were read there, and reads none of them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gemserve.contract.events import Finished
from gemserve.contract.filter_plan import Segment
from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.requests import Request
from gemserve.errors import GemserveError, RequestError

_FIELD = "filter.max_seconds"


async def read_in_time(
    request: Request, read: Callable[[Request], Awaitable[Finished]], ends_s: float
) -> frozenset[int]:
    """The ranks of the excerpts that could be read until `ends_s`, of `time.monotonic()`.

    `request`: planned, with all that was found. If that is short enough to be read at once, none is
    left out. `read` has the engine read a request to its end. Raises `RequestError` if it is not
    read in segments, and `GemserveError` if the engine fails or takes no more.
    """
    ranks = frozenset(excerpt.rank for excerpt in request.excerpts)
    if request.reading is not None and request.reading.stands_for is None:
        request = replace(  # the reader reads them
            request.reading, tenant=request.tenant, cache_salt=request.cache_salt
        )
    plan = request.plan
    assert plan is not None, "the builder has planned it"
    if plan.segments is None:
        if plan.reason == "short_prompt" or len(ranks) == 1:
            return ranks
        raise RequestError(
            f"{_FIELD}: only where documents are read in windows; this request would read what was "
            "found as one text",
            param=_FIELD,
        )
    done = set[int]()
    for excerpt in sorted(request.excerpts, key=lambda each: each.rank):
        segments = [segment for segment in plan.segments.segments if _is_within(segment, excerpt)]
        if segments and not await _is_read(_part(request, excerpt, segments), read, ends_s):
            break
        done.add(excerpt.rank)
    return frozenset(done)


def _is_within(segment: Segment, excerpt: Excerpt) -> bool:
    return excerpt.start <= segment.start and segment.stop <= excerpt.stop


def _part(request: Request, excerpt: Excerpt, segments: list[Segment]) -> Request:
    """A request that reads these segments of another one, and ends."""
    assert request.plan is not None
    assert request.plan.segments is not None
    reading = replace(request.plan.segments, segments=tuple(segments))
    return replace(
        request,
        request_id=f"{request.request_id}-read{excerpt.rank}",
        documents=(excerpt.file_id,),
        selects_only=False,
        summarizes_only=True,
        grammar=None,
        prompt_logprobs=None,
        notes=None,
        plan=request.plan.having(segments=reading, may_read_whole=False, fails_open=False),
    )


async def _is_read(
    part: Request, read: Callable[[Request], Awaitable[Finished]], ends_s: float
) -> bool:
    """Could it be read until `ends_s`? If not, the engine is told to stop."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        return False
    try:
        async with asyncio.timeout(left_s):
            last = await read(part)
    except TimeoutError:
        return False
    if last.segments_read is None:
        raise GemserveError(f"a candidate could not be read: {last.error}")
    return True
