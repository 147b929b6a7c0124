"""Finds what libraries have of a request's question, before the request is built with it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from anyio import to_thread
from fastapi import Request

from gemserve.api.requests.base_bodies import FilterBody
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.turns import TextTurns, TextWait
from gemserve.contract.events import Finished
from gemserve.contract.filter_options import CANDIDATES
from gemserve.contract.requests import Request as EngineRequest
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
    has_cache: bool
    searches: TextTurns = field(default_factory=TextTurns)

    async def put_in_front(
        self,
        http: Request,
        wanted: FilterBody,
        alone: EngineRequest,
        again: Callable[[int], Awaitable[EngineRequests]],
        read: Callable[[EngineRequest], Awaitable[Finished]],
        wait: TextWait,
    ) -> EngineRequests:
        if wanted.max_seconds is not None and not self.has_cache:
            raise RequestError(
                "filter.max_seconds: needs the document cache, which this server has not; start it "
                "with a --cache-memory above 0",
                param="filter.max_seconds",
            )
        began_s = time.monotonic()
        names, tenant = wanted.libraries, alone.tenant
        await to_thread.run_sync(self.shelf.check_names, tenant, names)
        question = await read(self.shelf.requests.for_question(alone))
        candidates = wanted.candidates or CANDIDATES
        find = partial(self.shelf.find, tenant, names, alone, question, candidates)
        # its text is paid for already
        found = await self.searches.run(http, tenant, 0, find, wait=wait)
        wanted.found(found)
        length = num_bytes(found.excerpts.text)
        built = await again(length)
        if wanted.max_seconds is None or not found.excerpts.parts:
            return built
        whole = replace(built.requests[0], tenant=tenant, cache_salt=alone.cache_salt)
        ranks = await read_in_time(whole, read, began_s + wanted.max_seconds)
        if len(ranks) == len(found.excerpts.parts):
            return built
        wanted.found(found.only(ranks))
        return await again(length)
