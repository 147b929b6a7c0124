"""Long texts are tokenized a few at a time, the keys in turn: each takes much memory meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from gemserve.errors import RequestError
from gemserve.prompting.client_text import texts_within
from gemserve.prompting.encoding import num_bytes
from gemserve.prompting.stopping import Stopped, stoppable_by

LONG_BYTES = 256 << 10  # a tokenizer takes some 300 bytes of memory for each character
AT_ONCE = 2
# of what is only tokenized or detokenized; or as many as a prompt may have
MOST_BYTES = 4 << 20
MOST_TOKENS = 1 << 20
BYTES_PER_TOKEN = 4  # of text, of which nobody has counted the tokens
T = TypeVar("T")
_LEAST_CHARS = 16  # as which each text counts: many short ones take as long as a few long ones


class LongTexts:
    """Gives turns to requests with long texts. It is used on the event loop only.

    A key has one turn at a time, so that others find one free. A turn ends when its client leaves.
    """

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._working: Counter[bytes] = Counter()  # turns, by tenant
        # by tenant, who waits; the tenant that had its turn longest ago is first
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(
        self, http: Request, tenant: bytes, num_bytes: int, work: Callable[[], Awaitable[T]]
    ) -> T:
        """What `work` returns, which works on a text of so many bytes. A short one need not wait.

        When the client leaves, work in threads is stopped (see `prompting.stopping`), and the
        request ends. Its key pays for text that was begun.
        """
        if num_bytes <= LONG_BYTES:
            return await work()
        stop = threading.Event()
        leaving = asyncio.ensure_future(_leaving(http, stop))
        try:
            await self._wait_for_turn(tenant, leaving)
            try:
                with stoppable_by(stop):
                    return await work()
            except Stopped as error:
                charge(http, num_bytes // BYTES_PER_TOKEN)
                raise _client_left() from error
            finally:
                self._give_back(tenant)
        finally:
            stop.set()  # for a thread that still works, if this task is cancelled
            leaving.cancel()
            await asyncio.wait([leaving])

    async def _wait_for_turn(self, tenant: bytes, leaving: asyncio.Future[None]) -> None:
        taking = asyncio.ensure_future(self._take(tenant))
        try:
            await asyncio.wait([taking, leaving], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not taking.cancel() and not taking.cancelled():
                self._give_back(tenant)
            raise
        if not taking.done():
            taking.cancel()
            await asyncio.wait([taking])
            raise _client_left()

    async def _take(self, tenant: bytes) -> None:
        if self._free and self._may_work(tenant):
            self._begin(tenant)
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._forget(tenant, waiting)
            else:  # the turn had just come
                self._give_back(tenant)
            raise

    def _may_work(self, tenant: bytes) -> bool:
        return not (tenant and self._working[tenant])  # without keys nobody knows who is who

    def _begin(self, tenant: bytes) -> None:
        self._free -= 1
        self._working[tenant] += 1

    def _give_back(self, tenant: bytes) -> None:
        self._free += 1
        self._working[tenant] -= 1
        self._working += Counter()  # drops tenants without any
        for following, queue in list(self._waiting.items()):
            if not self._may_work(following):
                continue
            for waiting in list(queue):
                self._forget(following, waiting)
                if not waiting.done():  # else it is about to leave
                    self._begin(following)
                    waiting.set_result(None)
                    return

    def _forget(self, tenant: bytes, waiting: asyncio.Future[None]) -> None:
        """Take out one of those who wait. Its tenant is then behind all others."""
        queue = self._waiting.pop(tenant, deque())
        if waiting in queue:
            queue.remove(waiting)
        if queue:
            self._waiting[tenant] = queue


async def _leaving(http: Request, stop: threading.Event) -> None:
    """Returns when the client has left, of whose request the whole body has come."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stop.set()


def _client_left() -> HTTPException:
    return HTTPException(499, "the client left")  # nobody reads it


def charge(http: Request, num_tokens: int) -> None:
    """Count tokens to the quota of the request's key, if there are keys."""
    place = http.scope["state"].get("place")
    if place is not None:
        place.charge(num_tokens)


def count_chars(value: Any) -> int:
    """Characters of all texts within a JSON value, names of members too."""
    return _count(value, len)


def count_chat_chars(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Characters of all that a chat template gets from a client, but for the names of roles."""
    return count_chars([_shown(messages), tools, variables or {}])


def count_chat_bytes(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Bytes as UTF-8 of all that a chat template gets from a client, but for the names of roles."""
    return _count([_shown(messages), tools, variables or {}], num_bytes)


def check_tokenized_bytes(size: int, limit: int, field: str) -> None:
    """Raise `RequestError` for a text that is too long to be tokenized."""
    if size > limit:
        raise RequestError(
            f"{field}: has {size} bytes as UTF-8, the limit of what is tokenized is {limit}",
            param=field,
            code="body_too_large",
        )


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[value for name, value in each.items() if name != "role"] for each in messages]


def _count(value: Any, size: Callable[[str], int]) -> int:
    return sum(max(_LEAST_CHARS, size(text)) for text in texts_within(value) if text)
