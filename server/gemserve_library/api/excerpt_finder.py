"""Finds what libraries have of a request's question, before the request is built with it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from anyio import to_thread
from fastapi import Request

from gemserve.api.access.keys import tenant_of
from gemserve.api.requests.base_bodies import FilterBody
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.turns import TextTurns
from gemserve.contract.events import Finished
from gemserve.contract.filter_options import CANDIDATES
from gemserve.engine.worker import Engine
from gemserve.errors import RequestError
from gemserve.prompting.encoding import num_bytes
from gemserve_library.api.shelf import Shelf
from gemserve_library.api.timed_reading import read_in_time


@dataclass(frozen=True, slots=True)
class LibraryExcerpts:
    """See `gemserve.api.routes.submission.ExcerptFinder`.

    `searches`: a few at a time, because a library is searched by one request at a time, and those
    that wait for it would hold the threads of everybody.
    """

    shelf: Shelf
    engine: Engine
    has_cache: bool
    searches: TextTurns = field(default_factory=TextTurns)

    async def put_in_front(
        self,
        http: Request,
        wanted: FilterBody,
        alone: EngineRequests,
        again: Callable[[int], Awaitable[EngineRequests]],
        cache_salt: str,
    ) -> EngineRequests:
        if wanted.max_seconds is not None and not self.has_cache:
            raise RequestError(
                "filter.max_seconds: needs the document cache, which this server has not; start it "
                "with a --cache-memory above 0",
                param="filter.max_seconds",
            )
        began_s = time.monotonic()
        names, tenant = wanted.libraries, tenant_of(http)
        await to_thread.run_sync(self.shelf.check_names, tenant, names)
        request = replace(alone.requests[0], tenant=tenant, cache_salt=cache_salt)
        stream = self.engine.submit(self.shelf.requests.for_question(request))
        try:
            async for event in stream:
                last = event
        finally:
            stream.cancel()
        assert isinstance(last, Finished)
        candidates = wanted.candidates or CANDIDATES
        find = partial(self.shelf.find, tenant, names, request, last, candidates)
        found = await self.searches.run(http, tenant, 0, find)  # its text is paid for already
        wanted.found(found)
        length = num_bytes(found.excerpts.text)
        built = await again(length)
        if wanted.max_seconds is None or not found.excerpts.parts:
            return built
        whole = replace(built.requests[0], tenant=tenant, cache_salt=cache_salt)
        read = await read_in_time(whole, self.engine.submit, began_s + wanted.max_seconds)
        if len(read) == len(found.excerpts.parts):
            return built
        wanted.found(found.only(read))
        return await again(length)
