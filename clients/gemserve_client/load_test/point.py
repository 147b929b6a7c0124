"""Runs one point of a load test: requests at given times, or a fixed number at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from gemserve_client.load_test.streamed_request import CANCELLED, Client, Record
from gemserve_client.load_test.traffic import Job

_ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Limits:
    """When the whole run must end: at `ends_s` (`perf_counter`), on Ctrl-C, or on SIGTERM.

    `signal_number`: of the signal that has come.
    """

    ends_s: float
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    signal_number: int | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_s - time.perf_counter())

    @property
    def is_over(self) -> bool:
        return self.interrupted.is_set() or self.left_s == 0

    @contextlib.contextmanager
    def watching_signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the run instead of the program."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):  # on Windows they still end the program
            for number in _ENDING:
                loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError):
                for number in _ENDING:
                    loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        self.signal_number = self.signal_number or number
        self.interrupted.set()


class Progress:
    """A progress bar on a terminal. Elsewhere it shows nothing."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self.started = self.ended = self.failed = 0

    async def show(self) -> None:
        """Redraw the bar until the task is cancelled."""
        if not sys.stderr.isatty():  # making a bar takes time even if it is disabled
            return
        with tqdm(desc=self._title, total=self._total, leave=False, unit="request") as bar:
            while True:
                running = {"running": self.started - self.ended}
                bar.set_postfix(running | ({"failed": self.failed} if self.failed else {}))
                bar.update(self.ended - bar.n)
                await asyncio.sleep(0.2)


@dataclass(slots=True)
class Point:
    """The requests of one point, and how long they took together."""

    client: Client
    progress: Progress
    origin_s: float = field(default_factory=time.perf_counter)
    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0

    async def run(
        self, jobs: Iterator[Job], limits: Limits, *, concurrency: int | None, ramp_s: float
    ) -> None:
        """Send `jobs` at their `due_s`, or `concurrency` at a time, until `limits` are reached."""
        if concurrency is None:
            sending = asyncio.create_task(self._by_schedule(jobs))
        else:
            sending = asyncio.create_task(self._by_workers(jobs, concurrency, ramp_s))
        stopped = asyncio.create_task(limits.interrupted.wait())
        shown = asyncio.create_task(self.progress.show())
        self.origin_s = time.perf_counter()
        await asyncio.wait(
            {sending, stopped}, timeout=limits.left_s, return_when=asyncio.FIRST_COMPLETED
        )
        self.duration_s = time.perf_counter() - self.origin_s
        for task in (sending, stopped, shown):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        await asyncio.wait({stopped, shown})

    async def _by_schedule(self, jobs: Iterator[Job]) -> None:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                assert job.due_s is not None
                wait_s = self.origin_s + job.due_s - time.perf_counter()
                await asyncio.sleep(max(0.0, wait_s))
                group.create_task(self._send(job))

    async def _by_workers(self, jobs: Iterator[Job], concurrency: int, ramp_s: float) -> None:
        async def work(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            # all workers share the iterator: the first free one takes the next job
            for job in jobs:
                await self._send(job)

        async with asyncio.TaskGroup() as group:
            for worker in range(concurrency):
                group.create_task(work(ramp_s * worker / concurrency))

    async def _send(self, job: Job) -> None:
        record = Record(index=job.index, due_s=job.due_s)
        self.records.append(record)
        self.progress.started += 1
        try:
            await self.client.send(job, record, self.origin_s)
        finally:
            self.progress.ended += 1
            self.progress.failed += record.error not in (None, CANCELLED)
