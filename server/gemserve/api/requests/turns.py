"""Threads that work on texts: a few at a time, the keys one after the other.

They share one interpreter lock with the event loop and the engine, and often one processor core. So
many of them make nothing faster, and everything else slower. One key's texts would keep another's
waiting, and be worked on when their clients have long left.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from anyio import to_thread
from fastapi import Request
from starlette.exceptions import HTTPException

from gemserve.api.requests.long_texts import BYTES_PER_TOKEN, charge
from gemserve.errors import WaitedTooLong
from gemserve.holdings import Holdings
from gemserve.prompting.stopping import Stopped, check_stopped, stoppable_by

LONG_BYTES = 256 << 10  # a tokenizer takes some 300 bytes of memory for each character
LONG_AT_ONCE = 2
_MOST_SHORT_AT_ONCE = 4
# While another key has requests, a key's threads rest for so many times as long as they have worked
_RESTS = 3.0
T = TypeVar("T")


class TenantTurns:
    """Gives so many turns at a time to tenants. It is used on the event loop only.

    A tenant leaves some free for others, and has its own in the order of its requests.
    """

    def __init__(self, at_once: int) -> None:
        self._turns = Holdings(at_once)
        self._resting: dict[bytes, float] = {}  # until when, of `time.monotonic()`
        # by tenant, who waits; the tenant that had its turn longest ago is first
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, tenant: bytes) -> None:
        """Wait for a turn, which must be given back."""
        if self._may_begin(tenant) and tenant not in self._waiting:
            self._turns.take(tenant)
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._forget(tenant, waiting)
            else:  # the turn had just come
                self.give_back(tenant)
            raise

    def give_back(self, tenant: bytes, rest_s: float = 0.0) -> None:
        """End a turn. Whoever may have the next one has it.

        `rest_s`: for so long the tenant has none, after what it has to rest already.
        """
        self._turns.give_back(tenant)
        if tenant in self._resting:
            self._resting[tenant] += rest_s
        elif rest_s:
            self._resting[tenant] = time.monotonic() + rest_s
            self._rest(tenant)
        self._begin_next()

    def _rest(self, tenant: bytes) -> None:
        left_s = self._resting[tenant] - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._rest, tenant)
            return
        del self._resting[tenant]
        self._begin_next()

    def _begin_next(self) -> None:
        for following, queue in list(self._waiting.items()):
            if not self._may_begin(following):
                continue
            for waiting in list(queue):
                self._forget(following, waiting)
                if not waiting.done():  # else it is about to leave
                    self._turns.take(following)
                    waiting.set_result(None)
                    return

    def _may_begin(self, tenant: bytes) -> bool:
        return tenant not in self._resting and self._turns.free > 0 and self._turns.may_take(tenant)

    def _forget(self, tenant: bytes, waiting: asyncio.Future[None]) -> None:
        """Take out one of those who wait. Its tenant is then behind all others."""
        queue = self._waiting.pop(tenant, deque())
        if waiting in queue:
            queue.remove(waiting)
        if queue:
            self._waiting[tenant] = queue


@dataclass(slots=True)
class TextWait:
    """For how many seconds a request's texts may wait for their turns, and how long they have.

    `name`: what says so. Only waiting counts: work on a text takes as long as it must.
    """

    limit_s: float
    name: str
    waited_s: float = 0.0


class TextTurns:
    """Works on the texts of requests in threads. Short texts do not wait for long ones."""

    def __init__(self, is_alone: Callable[[bytes], bool] = lambda tenant: True) -> None:
        """`is_alone`: has no other tenant than this one requests in progress?"""
        self._short, self._long = TenantTurns(_short_at_once()), TenantTurns(LONG_AT_ONCE)
        self._is_alone = is_alone

    async def run(
        self,
        http: Request,
        tenant: bytes,
        num_bytes: int,
        work: Callable[[], T],
        *,
        wait: TextWait | None = None,
    ) -> T:
        """What `work` returns, which works on a text of so many bytes. A thread calls it.

        When the client leaves, the work is stopped (see `prompting.stopping`), and the request
        ends. Its key pays for text that was begun. Raises `WaitedTooLong` as `wait` says, to which
        this adds.
        """
        turns = self._long if num_bytes > LONG_BYTES else self._short
        stop = threading.Event()
        leaving = asyncio.ensure_future(_leaving(http, stop))
        timed = _Timed(work)
        try:
            await _wait_for_turn(turns, tenant, leaving, wait)
            try:
                with stoppable_by(stop):
                    done = await to_thread.run_sync(timed)
                    check_stopped()
                    return done
            except Stopped as error:
                charge(http, num_bytes // BYTES_PER_TOKEN)
                raise _client_left() from error
            finally:
                rest_s = 0.0 if self._is_alone(tenant) else _RESTS * timed.processor_s
                turns.give_back(tenant, rest_s)
        finally:
            stop.set()  # for a thread that still works, if this task is cancelled
            leaving.cancel()
            await asyncio.wait([leaving])


class _Timed(Generic[T]):
    """Calls `work`, and counts the seconds of processor time that it takes its thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.processor_s = 0.0

    def __call__(self) -> T:
        began_s = time.thread_time()
        try:
            return self._work()
        finally:
            self.processor_s = time.thread_time() - began_s


def _short_at_once() -> int:
    """How many short texts are worked on at a time: two, or more if there are many cores."""
    return max(2, min(_MOST_SHORT_AT_ONCE, len(os.sched_getaffinity(0)) // 2))


async def _wait_for_turn(
    turns: TenantTurns, tenant: bytes, leaving: asyncio.Future[None], wait: TextWait | None
) -> None:
    taking = asyncio.ensure_future(turns.take(tenant))
    left_s = None if wait is None else max(0.0, wait.limit_s - wait.waited_s)
    came_s = time.monotonic()
    try:
        await asyncio.wait([taking, leaving], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if not taking.cancel() and not taking.cancelled():
            turns.give_back(tenant)
        raise
    if wait is not None:
        wait.waited_s += time.monotonic() - came_s
    if not taking.done():
        taking.cancel()
        await asyncio.wait([taking])
        if wait is None or leaving.done():
            raise _client_left()
        raise WaitedTooLong(waited_s=wait.waited_s, limit_s=wait.limit_s, name=wait.name)


async def _leaving(http: Request, stop: threading.Event) -> None:
    """Returns when the client has left, of whose request the whole body has come."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stop.set()


def _client_left() -> HTTPException:
    return HTTPException(499, "the client left")  # nobody reads it
