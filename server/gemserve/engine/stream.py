"""The events of one request, on their way from the engine's worker to an event loop. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

from gemserve.contract.events import Event, Finished, LentGroups
from gemserve.contract.requests import Request
from gemserve.engine.sequence.progress import Progress

T = TypeVar("T")


class Stream:
    """One request's events, read on the event loop that submitted it.

    Iteration ends after `Finished`, which always comes. `cancel` may be called at any time, any
    number of times, from any thread. While `is_watched` is set, `progress` says how far the request
    has come, until its first token. `lent`: which groups of its segments the engine awaits from
    others, if the request lets it; none once the request has ended. `on_event` is called with each
    event when it comes, however late it is read. `is_taken_in`: the engine may have begun with it.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self._loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancelled = threading.Event()
        self.lent = asyncio.Future[LentGroups](loop=loop) if request.lent_groups else None
        self.is_watched = self.is_taken_in = False
        self.on_event: Callable[[Event], None] | None = None
        self.progress: Progress | None = Progress(
            phase="queue", tokens=0, total=len(request.prompt_ids)
        )

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def give_up(self) -> None:
        """End the events without the worker, which is in a step that does not end."""
        self._put(Finished(reason="abort", completion_tokens=0, is_unread=not self.is_taken_in))

    def emit(self, event: Event) -> None:
        """Hand an event to the reader's loop: see `emit_all`."""
        emit_all([(self, event)])

    def tell_lent(self, groups: LentGroups) -> None:
        """Set `lent` if it is not set. The worker calls this."""
        _call_on(self._loop, self._set_lent, groups, [self])

    def _put(self, event: Event) -> None:
        self._events.put_nowait(event)
        if isinstance(event, Finished) and self.lent is not None:
            self._set_lent(LentGroups())

    def _set_lent(self, groups: LentGroups) -> None:
        assert self.lent is not None
        if not self.lent.done():
            self.lent.set_result(groups)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished):
                return


def emit_all(emitted: Sequence[tuple[Stream, Event]]) -> None:
    """Hand the events of a step to the loops of their readers.

    The worker calls this. It wakes each loop once: that is a call of the system, after which the
    worker waits for the interpreter's lock. A closed loop has no readers.
    """
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]] = {}
    for stream, event in emitted:
        of_loops.setdefault(stream._loop, []).append((stream, event))
    for loop, some in of_loops.items():
        _call_on(loop, _put_all, some, [stream for stream, _ in some])


def _put_all(emitted: Iterable[tuple[Stream, Event]]) -> None:
    for stream, event in emitted:
        stream._put(event)
    for stream, event in emitted:  # then: whatever fails here, nobody loses an event
        if stream.on_event is not None:
            stream.on_event(event)


def _call_on(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[T], object],
    argument: T,
    streams: Iterable[Stream],
) -> None:
    """Call a function on a loop. If it is closed, nobody reads the streams."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        for stream in streams:
            stream.cancel()
