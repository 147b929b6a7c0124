"""Read the engine's events for one HTTP request: several streams, disconnects, pauses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Protocol

from fastapi import Request

from gemserve.api.replies.failures import is_failure
from gemserve.api.requests.client_timeout import Timeout
from gemserve.contract.events import Event, Finished
from gemserve.engine.stream import Stream

# A stream's head goes out at the latest after so long: clients wait for it with a timeout of
# their own, and cannot tell a server that reads from one that is gone.
FIRST_PAUSE_S = 1.0
# If a request ends unless it is begun within so long, its head waits for that, and a bit more.
MOST_HELD_S, HELD_MORE_S = 10.0, 0.5

# So long after a stream was cancelled it is ended without the engine, whose step may hang.
GRACE_S = 5.0

Arrival = tuple[int, Event]  # a stream's index, and an event of it


class Observer(Protocol):
    """Sees every event of a stream, and `close` when the reading stops."""

    def see(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Observers:
    """Several observers of one stream."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def see(self, event: Event) -> None:
        for observer in self._observers:
            observer.see(event)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


class AtEnd:
    """Calls `end` when the reading stops, and sees nothing."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def see(self, event: Event) -> None:
        pass

    def close(self) -> None:
        self._end()


class EventReader:
    """Reads the streams of one HTTP request, which has one for each choice.

    It shows every event to its stream's observer, and cancels the streams when the client leaves
    or the reading stops.
    """

    def __init__(
        self,
        http: Request,
        streams: Sequence[Stream],
        observers: Sequence[Observer],
        *,
        keep_alive_s: float,
        timeout: Timeout,
        count_unbuilt: Callable[[], None],
        count_late: Callable[[], int],
        begin_within_s: float = math.inf,
    ) -> None:
        """`timeout`: after so long the streams that have not ended fail. `begin_within_s`: so long
        the engine may wait before it begins with the first one, whose prompt is that of all; then
        it ends the request, which is a status for as long as no head was sent.

        `count_unbuilt`: for whoever cannot build a reply from what is read here. `count_late`: for
        streams that end because they would have come too late; it says when to try again.
        """
        self.streams = streams
        self._http = http
        self._observers = observers
        self.keep_alive_s = keep_alive_s
        self.count_unbuilt = count_unbuilt
        self._timeout, self._count_late = timeout, count_late
        self._is_overdue = self._has_begun = False
        self._has_one_prompt = len(streams) == 1 or begin_within_s < math.inf
        self._given_up: asyncio.TimerHandle | None = None
        held_s = FIRST_PAUSE_S
        if begin_within_s <= MOST_HELD_S:
            held_s = max(0.0, begin_within_s) + HELD_MORE_S
        pauses = chain([min(held_s, keep_alive_s)], repeat(keep_alive_s))
        self._find_pause_s: Callable[[], float] = partial(next, pauses)
        self._begun: AsyncGenerator[Arrival | None] | None = None
        self._first: Arrival | None = None

    async def events(self) -> AsyncGenerator[Arrival]:
        """The streams' events in the order in which they come."""
        async with aclosing(self._read(lambda: None)) as arrivals:
            async for arrival in arrivals:
                if arrival is not None:
                    yield arrival

    async def read_to_end(self, take: Callable[[Event], object]) -> None:
        """Give `take` every event, whichever stream it is of, until all have ended."""
        async with aclosing(self.events()) as arrivals:
            async for _, event in arrivals:
                take(event)

    def pause_by(self, find_pause_s: Callable[[], float]) -> None:
        """Let `find_pause_s` say how many seconds a pause is, anew for each."""
        self._find_pause_s = find_pause_s

    async def early_failure(self) -> Finished | None:
        """Wait for the first event or pause. The event if it is the end of a request that failed.

        Nothing of it must have been read before. `events_and_pauses` goes on from there.
        """
        self._begun = self._read(self._find_pause_s)
        try:
            self._first = await anext(self._begun)
        except BaseException:
            await self._begun.aclose()
            raise
        event = None if self._first is None else self._first[1]
        if not isinstance(event, Finished) or not is_failure(event):
            return None
        await self._begun.aclose()
        return event

    async def events_and_pauses(self) -> AsyncGenerator[Arrival | None]:
        """The same, with None whenever no event came for a while, which is `keep_alive_s` seconds.

        The first pause is shorter: see `FIRST_PAUSE_S` and `MOST_HELD_S`.
        """
        is_begun = self._begun is not None
        async with aclosing(self._begun or self._read(self._find_pause_s)) as arrivals:
            if is_begun:
                yield self._first
            async for arrival in arrivals:
                yield arrival

    async def _read(
        self, find_pause_s: Callable[[], float | None]
    ) -> AsyncGenerator[Arrival | None]:
        watcher = asyncio.create_task(self._cancel_on_disconnect())
        left_s = max(0.0, self._timeout.ends_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, self._end_overdue)
        readers = [aiter(stream) for stream in self.streams]
        pending = {asyncio.ensure_future(anext(r)): index for index, r in enumerate(readers)}
        try:
            while pending:
                done, _ = await asyncio.wait(
                    pending, timeout=find_pause_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield None
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    # Not raised: the exception would hold this frame, and the frame the task that
                    # holds the exception. Such a circle would keep the prompt and its adapter in
                    # memory until the garbage collector runs.
                    if isinstance(task.exception(), StopAsyncIteration):
                        continue
                    came = task.result()
                    self._has_begun |= not (isinstance(came, Finished) and came.is_unread)
                    event = self._explained(came)
                    self._observers[index].see(event)
                    if isinstance(event, Finished) and event.late == "not_begun":
                        event = replace(event, retry_after_s=self._count_late())
                    pending[asyncio.ensure_future(anext(readers[index]))] = index
                    if not self._is_overdue or isinstance(event, Finished):
                        yield index, event
        finally:
            watcher.cancel()
            timer.cancel()
            if self._given_up is not None:
                self._given_up.cancel()
            for stream, observer in zip(self.streams, self._observers, strict=True):
                stream.cancel()
                observer.close()
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _end_overdue(self) -> None:
        self._is_overdue = True
        self._cancel()

    def _explained(self, event: Event) -> Event:
        """The event, or why it ended a stream that has taken too long, or would have.

        The engine may have been done in time: then it was the client that has read too slowly.
        """
        if not isinstance(event, Finished) or event.late is not None:
            return event
        # of several prompts, none is of use without the others
        is_unread = event.is_unread and self._has_one_prompt and not self._has_begun
        if is_unread and self._is_overdue:
            error = event.error or f"its reading had not begun after {self._limit}"
            return replace(event, reason="error", error=error, late="not_begun")
        if self._is_overdue:
            error = f"it took longer than {self._limit}"
            return replace(event, reason="error", error=error, late="not_done")
        return event

    @property
    def _limit(self) -> str:
        return f"{self._timeout.seconds:g} s ({self._timeout.name})"

    async def _cancel_on_disconnect(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()
        if self._given_up is None:
            loop = asyncio.get_running_loop()
            self._given_up = loop.call_later(GRACE_S, self._give_up)

    def _give_up(self) -> None:
        for stream in self.streams:
            stream.give_up()
