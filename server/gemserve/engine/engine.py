"""The engine: one worker thread owns the model; requests go in, event streams come out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from gemserve.engine.passes import Cancelled
from gemserve.errors import EngineDead, QueueFull
from gemserve.types import Event, Finished, Request

log = logging.getLogger("gemserve.engine")


class Runs(Protocol):
    """What the worker needs of a pipeline; tests put a fake here."""

    def run(self, request: Request, is_cancelled: Callable[[], bool]) -> Iterator[Event]: ...


class Stream:
    """One request's events, read on the event loop that submitted it.

    Iteration ends after `Finished`, which always comes. `cancel` may be called at any time, any
    number of times, from any thread.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self._loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def emit(self, event: Event) -> None:
        """Called by the worker; a loop that is closed has no reader left."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished):
                return


class Engine:
    """A bounded queue in front of one worker thread.

    Requests run one at a time, in order of arrival. A request that fails ends alone, with
    `finish_reason` "error"; if the worker itself dies, every request ends so and `submit` raises.
    """

    def __init__(self, pipeline: Runs, *, max_queue: int) -> None:
        self._pipeline = pipeline
        self._max_queue = max_queue
        self._waiting: deque[Stream] = deque()
        self._running: Stream | None = None
        self._changed = threading.Condition()
        self._is_stopping = False
        self._death: str | None = None
        self._worker = threading.Thread(target=self._work, name="gemserve-engine", daemon=True)
        self._worker.start()

    @property
    def num_running(self) -> int:
        return 0 if self._running is None else 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def death(self) -> str | None:
        """Why the worker is dead, or None while it lives."""
        return self._death

    def check_room(self) -> None:
        """Raise `QueueFull` or `EngineDead` if `submit` would; costs nothing."""
        if self._death is not None:
            raise EngineDead(self._death)
        if len(self._waiting) >= self._max_queue:
            raise QueueFull(waiting=len(self._waiting), limit=self._max_queue)

    def submit(self, request: Request) -> Stream:
        """Queue a request; call it on the event loop that will read the stream."""
        stream = Stream(request, asyncio.get_running_loop())
        with self._changed:
            self.check_room()
            if self._is_stopping:
                raise EngineDead("shutting down")
            self._waiting.append(stream)
            self._changed.notify()
        return stream

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel everything and end the worker. Idempotent."""
        with self._changed:
            self._is_stopping = True
            for stream in (*self._waiting, *([self._running] if self._running else [])):
                stream.cancel()
            self._changed.notify()
        self._worker.join(timeout_s)

    def _work(self) -> None:
        try:
            while (stream := self._next()) is not None:
                self._run(stream)
        except BaseException as error:
            log.exception("the engine's worker died")
            self._die(f"{type(error).__name__}: {error}")
        else:
            self._die("shut down")

    def _next(self) -> Stream | None:
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _run(self, stream: Stream) -> None:
        """Run one request to its one terminal event."""
        num_tokens = 0
        try:
            if stream.is_cancelled():
                raise Cancelled
            for event in self._pipeline.run(stream.request, stream.is_cancelled):
                num_tokens += len(getattr(event, "token_ids", ()))
                stream.emit(event)
        except Cancelled:
            stream.emit(Finished(reason="abort", completion_tokens=num_tokens))
        except Exception as error:
            log.exception("request %s failed", stream.request.request_id)
            message = f"{type(error).__name__}: {error}"
            stream.emit(Finished(reason="error", completion_tokens=num_tokens, error=message))

    def _die(self, cause: str) -> None:
        with self._changed:
            self._death = cause
            orphans = [*([self._running] if self._running else []), *self._waiting]
            self._waiting.clear()
            self._running = None
        for stream in orphans:
            stream.emit(Finished(reason="error", completion_tokens=0, error=cause))
