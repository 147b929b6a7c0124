"""Sends the calls of a mix at random times, whatever the server does, or as fast as it answers.

Arrivals are a Poisson process with a fixed seed. No more than a given number of requests are open
at once; an arrival beyond it waits at the client, and is counted as held back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from benchmarks.robustness.mix import Mix
from benchmarks.robustness.mixed_client import Call, MixedClient, Outcome, reloading

PULSE_S, PAUSE_S = 0.5, 3.0
Pick = Callable[[Random], Call]
# kinds that the server reads whole if its cache has most of the prompt, as after an idle while
_READ_WHOLE = ("agent", "document")


@dataclass(slots=True)
class Run:
    """What happened in one stretch of load."""

    outcomes: list[Outcome] = field(default_factory=list)
    held_back: int = 0
    most_open: int = 0
    seconds: float = 0.0
    pauses_s: list[float] = field(default_factory=list)  # in which this process did not run

    def count(self, verdict: str) -> int:
        return sum(outcome.verdict == verdict for outcome in self.outcomes)


class Turner:
    """Loads the adapter `TURNING` from two folders in turn. Its calls may have either's answer."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return ("turn-a", "turn-b")[self._count % 2]


class Sender:
    """Sends calls through one client and keeps their outcomes."""

    def __init__(self, client: MixedClient, *, most_open: int) -> None:
        self._client = client
        self._most_open = most_open
        self._turner = Turner()

    async def open_loop(self, pick: Pick, *, rate: float, seconds: float, seed: int) -> Run:
        """Send calls for `seconds`, `rate` of them a second, and wait for the last one's end."""
        times, picks = Random(f"{seed}/times"), Random(f"{seed}/picks")
        run = Run()
        began_s = time.perf_counter()
        due_s = times.expovariate(rate)
        async with pulse(run), asyncio.TaskGroup() as group:
            places = asyncio.Semaphore(self._most_open)
            while due_s < seconds:
                wait_s = began_s + due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                run.held_back += places.locked()
                await places.acquire()
                group.create_task(self._send(pick(picks), due_s, run, places))
                due_s += times.expovariate(rate)
        run.seconds = time.perf_counter() - began_s
        return run

    async def closed_loop(self, pick: Pick, *, at_once: int, seconds: float, seed: int) -> Run:
        """Keep `at_once` requests open for `seconds`. The last ones are waited for, uncounted."""
        rng = Random(f"{seed}/closed")
        run = Run()
        began_s = time.perf_counter()

        async def work() -> None:
            while time.perf_counter() < began_s + seconds:
                await self._send(pick(rng), time.perf_counter() - began_s, run, None)

        async with pulse(run), asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
        run.seconds = seconds
        run.outcomes = [o for o in run.outcomes if o.due_s + o.total_s <= seconds]
        return run

    async def _send(
        self, call: Call, due_s: float, run: Run, places: asyncio.Semaphore | None
    ) -> None:
        sent = reloading(self._turner.next()) if call.manner == "reload" else call
        outcome = await self._client.send(sent, due_s)
        outcome.answer = None  # an hour of answers would take the client's memory
        run.outcomes.append(outcome)
        if places is not None:
            run.most_open = max(run.most_open, self._most_open - places._value)
            places.release()


@asynccontextmanager
async def pulse(run: Run) -> AsyncIterator[None]:
    """Note the times in which this process did not run: timings around them mean nothing."""

    async def beat() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(PULSE_S)
            now_s = time.perf_counter()
            if now_s - last_s > PAUSE_S:
                run.pauses_s.append(round(now_s - last_s, 1))
            last_s = now_s

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def record(client: MixedClient, mix: Mix) -> dict[str, Any]:
    """Send every call alone, twice, and keep its answer as the right one.

    A call whose two answers differ, or that fails, is left out of the mix and reported. What an
    agent's prompt, or a question about a document, is answered when it is read whole is right, too.
    """
    unsteady: list[str] = []
    for kind, calls in mix.calls.items():
        # read whole only after all are filtered: the document of another question would be cached
        for record_one in (_record_one, *([_record_whole] if kind in _READ_WHOLE else [])):
            for call in list(calls):
                if call.manner in ("half", "reload"):
                    continue
                wrong = await record_one(client, call)
                if wrong is not None:
                    unsteady.append(f"{call.name}: {wrong}")
                    calls.remove(call)
        if not calls:
            raise RuntimeError(f"no call of the kind {kind} has a steady answer: {unsteady}")
    return {"recorded": sum(map(len, mix.calls.values())), "unsteady": unsteady}


async def _record_one(client: MixedClient, call: Call) -> str | None:
    """Keep what `call` is answered. Returns what is wrong about it, or None."""
    manner = call.manner
    call.manner = "stream" if manner in ("cancel", "slow") else manner
    try:
        for folder in ("turn-a", "turn-b") if call.kind == "turning" else (None,):
            if folder is not None:
                await client.send(reloading(folder), 0.0)
            answers = []
            for _ in range(2):
                known, call.expected = call.expected, []
                outcome = await client.send(call, 0.0)
                call.expected = known
                if outcome.verdict != "right" or outcome.answer is None:
                    return f"{outcome.verdict}: {outcome.detail}"
                answers.append(outcome.answer)
            if answers[0] != answers[1]:
                return f"two answers: {answers}"
            call.expected = [*call.expected, answers[0]]
    finally:
        call.manner = manner
    return None


async def _record_whole(client: MixedClient, call: Call) -> str | None:
    """Keep what `call` is answered when its prompt is read whole, too."""
    whole = replace(call, body={**call.body, "filter": {"method": "none"}}, expected=[])
    outcome = await client.send(whole, 0.0)
    if outcome.verdict != "right" or outcome.answer is None:
        return f"whole: {outcome.verdict}: {outcome.detail}"
    call.expected = [*call.expected, outcome.answer]
    return None
