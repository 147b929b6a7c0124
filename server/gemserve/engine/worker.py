"""The engine: one worker thread owns the core; requests go in, event streams come out.

The event loop never touches what the worker owns: the core with its sequences, memory and tensors,
and the streams of the requests in the core. Both sides share only this:

- the inbox, a list of streams that only changes under the lock `_changed`, and beside it what
  other engines have read of lent groups of segments;
- `LoadSnapshot`, which is frozen. The worker replaces it after everything it does, before it emits
  the resulting events, so that the reader of an event finds the load after it;
- `Core.check`, which reads nothing that ever changes;
- each `Stream`, whose events reach its event loop through `call_soon_threadsafe`, and whose
  `progress` is a frozen object that the worker replaces.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

from gemserve.contract.events import Event, Finished, LentGroups, SegmentsRead
from gemserve.contract.requests import Request
from gemserve.engine.cache.state import CacheState, StoredDocument
from gemserve.engine.sequence.progress import Progress
from gemserve.engine.stream import Stream, emit_all
from gemserve.errors import EngineDead, GemserveError, QueueFull, RequestError
from gemserve.holdings import may_hold

log = logging.getLogger("gemserve.engine")


class Steps(Protocol):
    """What the engine needs of a core. Tests use a fake.

    `add` returns a job of any type. Any thread may call `check`; only the worker calls the rest.
    """

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def waiting_of(self) -> Mapping[bytes, int]: ...
    @property
    def kv_usage_ratio(self) -> float: ...
    @property
    def cache_usage_ratio(self) -> float: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def internal_errors(self) -> Mapping[str, int]: ...
    def check(self, request: Request) -> None: ...
    def add(self, request: Request) -> Any: ...
    def cancel(self, job: Any) -> list[tuple[Any, Event]]: ...
    def progress(self, job: Any) -> Progress | None: ...
    def step(self) -> list[tuple[Any, Event]]: ...
    @property
    def stored_documents(self) -> Mapping[str, StoredDocument]: ...
    @property
    def cache_state(self) -> CacheState: ...
    def forget_documents(self, ids: Collection[str]) -> None: ...
    def lent_groups(self, job: Any) -> LentGroups: ...
    def take_group(self, job: Any, group: int, read: SegmentsRead | None) -> None: ...
    def close(self) -> None: ...


class IdleWork(Protocol):
    """What the worker does while there are no requests, in its own thread and in short pieces."""

    def run_piece(self) -> bool:
        """Do some of it. Returns True once nothing is left to do."""
        ...

    def abandon(self) -> None:
        """Do no more of it. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """How busy the core was when the worker last looked. `waiting_of`: requests of each tenant.

    `internal_errors`: see `Core.internal_errors`.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_of: Mapping[bytes, int] = field(default_factory=dict)
    kv_usage_ratio: float = 0.0
    cache_usage_ratio: float = 0.0
    stored_documents: Mapping[str, StoredDocument] = field(default_factory=dict)
    cache: CacheState = field(default_factory=CacheState)
    internal_errors: Mapping[str, int] = field(default_factory=dict)


def _load_of(core: Steps) -> LoadSnapshot:
    return LoadSnapshot(
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        waiting_of=core.waiting_of,
        kv_usage_ratio=core.kv_usage_ratio,
        cache_usage_ratio=core.cache_usage_ratio,
        stored_documents=core.stored_documents,
        cache=core.cache_state,
        internal_errors=core.internal_errors,
    )


class Engine:
    """A bounded inbox in front of one worker thread.

    A request that fails ends alone, with `finish_reason` "error". If the worker itself dies, every
    request ends so and `submit` raises. An engine that is not stopped ends with the process.
    """

    def __init__(self, core: Steps, *, max_queue: int, idle_work: IdleWork | None = None) -> None:
        self._core, self._idle_work = core, idle_work
        self._max_queue = max_queue
        self._inbox: list[Stream] = []
        self._load = LoadSnapshot()
        self._jobs: dict[Any, Stream] = {}
        self._forgets: list[tuple[frozenset[str], Future[None]]] = []
        self._groups_read: list[tuple[Stream, int, SegmentsRead | None]] = []
        self._changed = threading.Condition()
        self._is_draining = False
        self._is_stopping = False
        self._death: str | None = None
        self.turn: int | None = None  # the number of the worker's turn; None: it has nothing to do
        self._turns = count()
        self._worker = threading.Thread(target=self._work, name="gemserve-engine", daemon=True)
        self._worker.start()
        atexit.register(_stop_at_exit, weakref.ref(self))

    @property
    def num_running(self) -> int:
        return self._load.num_running

    @property
    def num_waiting(self) -> int:
        return self._load.num_waiting + len(self._inbox)

    @property
    def kv_usage_ratio(self) -> float:
        return self._load.kv_usage_ratio

    @property
    def cache_usage_ratio(self) -> float:
        return self._load.cache_usage_ratio

    @property
    def stored_documents(self) -> Mapping[str, StoredDocument]:
        """What the document cache has of stored documents, by id; those that it lacks are absent.

        A request that should store one has done so, or could not, when its `Finished` arrives.
        """
        return self._load.stored_documents

    @property
    def cache_state(self) -> CacheState:
        return self._load.cache

    @property
    def internal_errors(self) -> Mapping[str, int]:
        """What failed in the engine and was done in another way, by name, since the start."""
        return self._load.internal_errors

    @property
    def has_idle_work(self) -> bool:
        """Whether there is something left that the worker does while there are no requests."""
        return self._idle_work is not None

    @property
    def death(self) -> str | None:
        """Why the worker has ended; None while it runs."""
        return self._death

    @property
    def has_ended(self) -> bool:
        """Whether every request has ended, and there will be no other ones."""
        return self._death is not None

    @property
    def thread_id(self) -> int:
        return self._worker.ident or 0

    def check_room(
        self, count: int = 1, *, tenant: bytes = b"", on_their_way: int = 0, of_others: int = 0
    ) -> None:
        """Raise `QueueFull` or `EngineDead` if submitting `count` requests would. It is cheap.

        `on_their_way`: requests of this tenant that will need places, too, and `of_others` those of
        other tenants.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        waiting = self.num_waiting + on_their_way + of_others
        if waiting + count > self._max_queue:
            raise QueueFull(waiting=waiting, limit=self._max_queue)
        arrived = sum(stream.request.tenant == tenant for stream in list(self._inbox))
        held = self._load.waiting_of.get(tenant, 0) + arrived + on_their_way if tenant else 0
        if held and not may_hold(held + count, self._max_queue - waiting - count):
            raise QueueFull(waiting=waiting, limit=self._max_queue, of_key=held)

    def submit(self, request: Request) -> Stream:
        """Queue one request: see `submit_all`."""
        (stream,) = self.submit_all([request])
        return stream

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue all requests or none; call it on the event loop that will read the streams.

        Raises `CapacityExceeded` if one could not run even alone, `QueueFull`, `EngineDead`;
        `RequestError` if there are more than the queue ever holds.
        """
        if len(requests) > self._max_queue:
            raise RequestError(
                f"n={len(requests)}: so many choices never fit the queue of {self._max_queue}",
                param="n",
            )
        loop = asyncio.get_running_loop()
        for request in requests:
            assert request.plan is not None, "planned where it was built, off the event loop"
            self._core.check(request)
        streams = [Stream(request, loop) for request in requests]
        with self._changed:
            self.check_room(len(requests), tenant=requests[0].tenant)
            if self._is_stopping or self._is_draining:
                raise EngineDead("shutting down")
            self._inbox += streams
            self._changed.notify()
        return streams

    def forget_documents(self, ids: Collection[str]) -> Future[None]:
        """Drop what is cached of stored documents, between two steps. Any thread may call this.

        Requests that contain them and were submitted before go on, and store nothing. The future
        raises `EngineDead` if the worker ends first.
        """
        future: Future[None] = Future()
        with self._changed:
            if self._death is not None:
                future.set_exception(EngineDead(self._death))
                return future
            self._forgets.append((frozenset(ids), future))
            self._changed.notify()
        return future

    def take_group(self, stream: Stream, group: int, read: SegmentsRead | None) -> None:
        """Hand over what another engine has read of a lent group of segments.

        None: nobody has read it, so this engine does. Any thread may call this, at any time.
        """
        with self._changed:
            self._groups_read.append((stream, group, read))
            self._changed.notify()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused while running ones may finish."""
        return self._is_draining

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and stop after `timeout_s`. Requests that still run are aborted."""
        with self._changed:
            if self._is_draining:
                return
            self._is_draining = True
        timer = threading.Timer(timeout_s, self.stop)
        timer.daemon = True
        timer.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel everything and end the worker. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._worker.join(timeout_s)

    def abandon(self, cause: str) -> None:
        """End every request with an error. Only for a worker that is stuck, in any thread."""
        self._die(cause, "error")

    def _work(self) -> None:
        try:
            while self._take_in():
                self._drop_cancelled()
                if not self._core.is_idle:
                    self._emit(self._core.step())
                    self._publish_progress()
                elif self._idle_work is not None and self._idle_work.run_piece():
                    self._idle_work = None
            # passes under way must be unwound in the thread that runs them
            for job in list(self._jobs):
                self._emit(self._core.cancel(job))
        except BaseException as error:
            log.exception("the engine's worker died")
            self._die(f"{type(error).__name__}: {error}", "error")
        else:
            self._die("shut down", "abort")
            try:
                if self._idle_work is not None:
                    self._idle_work.abandon()
                self._core.close()
            except Exception:
                log.exception("the engine could not be closed")

    def _take_in(self) -> bool:
        """Move arrivals into the core; wait while there is nothing to do.

        False: it is time to stop.
        """
        with self._changed:
            self.turn = None
            self._changed.wait_for(
                lambda: (
                    self._inbox
                    or self._forgets
                    or self._groups_read
                    or self._is_stopping
                    or self._idle_work is not None
                    or not self._core.is_idle
                )
            )
            if self._is_stopping:
                return False
            self.turn = next(self._turns)
            arrivals, forgets = list(self._inbox), list(self._forgets)
            groups_read, self._groups_read = self._groups_read, []
        for stream in arrivals:
            end = self._add(stream)
            with self._changed:  # the stream has counted as waiting until now
                self._inbox.remove(stream)
                self._publish_load()
            if end is not None:
                stream.emit(end)
        jobs = {stream: job for job, stream in self._jobs.items()} if groups_read else {}
        for stream, group, read in groups_read:
            if stream in jobs:  # else it has ended
                self._core.take_group(jobs[stream], group, read)
        for ids, future in forgets:
            self._core.forget_documents(ids)
            self._publish_load()
            with self._changed:
                self._forgets.remove((ids, future))
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        return True

    def _add(self, stream: Stream) -> Finished | None:
        """Add one arrival to the core. Returns a `Finished` event if it cannot be added."""
        if stream.is_cancelled():
            return Finished(reason="abort", completion_tokens=0, is_unread=True)
        try:
            job = self._core.add(stream.request)
            self._jobs[job], stream.is_taken_in = stream, True
            if stream.lent is not None:
                stream.tell_lent(self._core.lent_groups(job))
        except Exception as error:  # one request's; the others go on
            is_ours = isinstance(error, (GemserveError, ValueError))
            message = str(error) if is_ours else f"{type(error).__name__}: {error}"
            return Finished(reason="error", completion_tokens=0, error=message)
        return None

    def _drop_cancelled(self) -> None:
        for job, stream in list(self._jobs.items()):
            if stream.is_cancelled():
                self._emit(self._core.cancel(job))

    def _emit(self, emitted: list[tuple[Any, Event]]) -> None:
        self._publish_load()
        emit_all([(self._jobs[job], event) for job, event in emitted])
        for job, event in emitted:
            if isinstance(event, Finished):
                del self._jobs[job]

    def _publish_progress(self) -> None:
        for job, stream in self._jobs.items():
            if stream.is_watched:
                stream.progress = self._core.progress(job)

    def _publish_load(self) -> None:
        self._load = _load_of(self._core)

    def _die(self, cause: str, reason: Literal["abort", "error"]) -> None:
        with self._changed:
            self._death, self.turn = cause, None
            orphans = [*self._jobs.values(), *self._inbox]
            self._inbox = []
            self._jobs = {}
            forgets, self._forgets = self._forgets, []
            self._load = LoadSnapshot()
        for _, future in forgets:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDead(cause))
        error = cause if reason == "error" else None
        end = Finished(reason=reason, completion_tokens=0, error=error)
        emit_all([(stream, end) for stream in orphans])


def _stop_at_exit(reference: weakref.ref[Engine]) -> None:
    # a thread that returns from torch while the interpreter shuts down aborts the process
    engine = reference()
    if engine is not None and engine._worker.is_alive():  # after a fork it does not run
        engine.stop()
