"""The events of one request, on their way from the engine's worker to an event loop. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from gemserve.engine.sequence.progress import Progress
from gemserve.types import Event, Finished, LentGroups, Request

T = TypeVar("T")


class Stream:
    """One request's events, read on the event loop that submitted it.

    Iteration ends after `Finished`, which always comes. `cancel` may be called at any time, any
    number of times, from any thread. While `is_watched` is set, `progress` says how far the request
    has come, until its first token. `lent`: which groups of its windows the engine awaits from
    others, if the request lets it; none once the request has ended.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self._loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancelled = threading.Event()
        self.lent = asyncio.Future[LentGroups](loop=loop) if request.lent_groups else None
        self.is_watched = False
        self.progress: Progress | None = Progress(
            phase="queue", tokens=0, total=len(request.prompt_ids)
        )

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def emit(self, event: Event) -> None:
        """Hand an event to the reader's loop.

        The worker calls this. A closed loop has no reader.
        """
        self._call_on_loop(self._events.put_nowait, event)
        if isinstance(event, Finished) and self.lent is not None:
            self.tell_lent(LentGroups())

    def tell_lent(self, groups: LentGroups) -> None:
        """Set `lent` if it is not set. The worker calls this."""
        self._call_on_loop(self._set_lent, groups)

    def _set_lent(self, groups: LentGroups) -> None:
        assert self.lent is not None
        if not self.lent.done():
            self.lent.set_result(groups)

    def _call_on_loop(self, function: Callable[[T], object], argument: T) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished):
                return
