"""The engine's promises: one terminal event each, a bounded queue, no request left hanging."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemserve.decoding.sampling import InvalidLogits
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from gemserve.errors import EngineDead, QueueFull
from gemserve.types import Event, FilterParams, Finished, Request, SamplingParams
from tests.fakes import FILTERED, FakeCore, FakeJob, Step, wait_for, wait_for_async

pytestmark = pytest.mark.anyio
LEFT_ALONE = """
import asyncio
import torch
from gemserve.engine.worker import Engine
from tests.fakes import FakeCore
from tests.unit.test_engine import request

class Busy(FakeCore):
    def step(self):
        torch.ones(500, 500) @ torch.ones(500, 500)
        self.started.set()
        return []

async def submit():
    engine.submit(request())

core = Busy()
engine = Engine(core, max_queue=1)
if {is_busy}:
    asyncio.run(submit())
    assert core.started.wait(30)
"""
Make = Callable[..., tuple[Engine, FakeCore]]


def request(name: str = "r") -> Request:
    return Request(
        request_id=name,
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        filter=FilterParams(method="none", keep=16),
    )


async def read(stream: Stream, timeout_s: float = 5.0) -> list[Event]:
    async with asyncio.timeout(timeout_s):
        return [event async for event in stream]


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Event]]:
    """Everything the worker emitted, by request id, read or not."""
    record: dict[str, list[Event]] = defaultdict(list)
    original = Stream.emit

    def emit(self: Stream, event: Event) -> None:
        record[self.request.request_id].append(event)
        original(self, event)

    monkeypatch.setattr(Stream, "emit", emit)
    return record


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    engines: list[Engine] = []

    def _make(*script: Step, max_queue: int = 4) -> tuple[Engine, FakeCore]:
        core = FakeCore(*script)
        engines.append(Engine(core, max_queue=max_queue))
        return engines[-1], core

    yield _make
    for engine in engines:
        engine.stop(5.0)


def assert_one_terminal(events: list[Event], reason: str) -> Finished:
    terminal = [e for e in events if isinstance(e, Finished)]
    assert len(terminal) == 1
    assert events[-1] is terminal[0]
    assert terminal[0].reason == reason
    assert (terminal[0].error is not None) == (reason == "error")
    return terminal[0]


async def test_a_finished_request_ends_once(make: Make, emitted: dict[str, list[Event]]) -> None:
    engine, _ = make(FILTERED, "a", "b")
    events = await read(engine.submit(request()))
    engine.stop()
    assert assert_one_terminal(events, "stop").completion_tokens == 2
    assert emitted["r"] == events


@pytest.mark.parametrize(
    "script",
    [(ValueError("boom"),), (FILTERED, "a", ValueError("boom")), (InvalidLogits("NaN"),)],
)
async def test_a_failing_request_fails_alone(
    make: Make, script: tuple[Step, ...], emitted: dict[str, list[Event]]
) -> None:
    engine, core = make(*script)
    end = assert_one_terminal(await read(engine.submit(request())), "error")
    assert type(script[-1]).__name__ in (end.error or "")
    assert end.completion_tokens == script.count("a")
    core.script = (FILTERED, "fine")
    assert_one_terminal(await read(engine.submit(request("next"))), "stop")
    engine.stop()
    assert len([e for e in emitted["r"] if isinstance(e, Finished)]) == 1


async def test_cancelled_while_queued_never_runs(make: Make) -> None:
    gate = threading.Event()
    engine, core = make(FILTERED, gate)
    first, second = engine.submit(request("first")), engine.submit(request("second"))
    await wait_for_async(core.started.is_set)
    second.cancel()
    second.cancel()
    gate.set()
    assert_one_terminal(await read(second), "abort")
    assert_one_terminal(await read(first), "stop")
    assert [r.request_id for r in core.requests] == ["first"]


async def test_cancelled_while_queued_frees_its_place_at_once(make: Make) -> None:
    """Else clients that gave up keep the queue full for those still there."""
    engine, core = make(threading.Event(), max_queue=1)
    engine.submit(request("running"))
    await wait_for_async(core.started.is_set)
    waiting = engine.submit(request("waiting"))
    waiting.cancel()
    assert_one_terminal(await read(waiting, timeout_s=1), "abort")
    assert engine.num_waiting == 0
    engine.submit(request("later"))


async def test_cancelled_while_running_stops_soon(make: Make) -> None:
    engine, core = make(FILTERED, "a", threading.Event())
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    await asyncio.sleep(0.02)
    stream.cancel()
    assert assert_one_terminal(await read(stream), "abort").completion_tokens == 1
    assert core.cancelled.is_set()


async def test_cancelled_after_the_end_harms_nobody(make: Make) -> None:
    engine, _ = make(FILTERED, "a")
    stream = engine.submit(request())
    await read(stream)
    stream.cancel()
    assert_one_terminal(await read(engine.submit(request())), "stop")


async def test_a_dead_worker_ends_every_request(
    make: Make, emitted: dict[str, list[Event]]
) -> None:
    gate = threading.Event()
    engine, _ = make(FILTERED, "a", gate, SystemExit("cuda is gone"))
    streams = [engine.submit(request(name)) for name in ("running", "one", "two")]
    assert engine.death is None
    gate.set()
    for stream in streams:
        assert "cuda is gone" in (assert_one_terminal(await read(stream), "error").error or "")
    assert all(len([e for e in es if isinstance(e, Finished)]) == 1 for es in emitted.values())
    assert "cuda is gone" in (engine.death or "")
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    with pytest.raises(EngineDead, match="cuda is gone"):
        engine.submit(request())
    with pytest.raises(EngineDead):
        engine.check_room()


async def test_a_full_queue_has_places_for_other_keys(make: Make) -> None:
    """A key that sent more than the server can do made it refuse everybody."""
    gate = threading.Event()
    engine, core = make(FILTERED, gate, max_queue=8)
    streams = [engine.submit(replace(request("running"), tenant=b"greedy"))]
    await wait_for_async(core.started.is_set)
    streams += [engine.submit(replace(request(), tenant=b"greedy")) for _ in range(6)]
    for check in (engine.check_room, lambda **of: engine.submit(replace(request(), **of))):
        with pytest.raises(QueueFull, match="6 requests of this API key wait"):
            check(tenant=b"greedy")
    streams.append(engine.submit(replace(request(), tenant=b"polite")))
    with pytest.raises(QueueFull):
        engine.check_room(tenant=b"third", of_others=1)
    engine.check_room(tenant=b"third")
    gate.set()
    for stream in streams:
        assert_one_terminal(await read(stream), "stop")
    assert not engine._load.waiting_of


async def test_the_queue_is_bounded(make: Make) -> None:
    gate = threading.Event()
    engine, core = make(FILTERED, gate, max_queue=2)
    streams = [engine.submit(request("running"))]
    await wait_for_async(core.started.is_set)
    streams += [engine.submit(request()) for _ in range(2)]
    for _ in range(3):
        with pytest.raises(QueueFull, match="limit is 2"):
            engine.submit(request("refused"))
        with pytest.raises(QueueFull):
            engine.check_room()
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    gate.set()
    for stream in streams:
        assert_one_terminal(await read(stream), "stop")
    engine.check_room()
    assert len(core.requests) == 3


async def test_requests_run_in_order_of_arrival(make: Make) -> None:
    engine, core = make(FILTERED, "a", max_queue=8)
    for stream in [engine.submit(request(str(i))) for i in range(8)]:
        await read(stream)
    assert [r.request_id for r in core.requests] == [str(i) for i in range(8)]


async def test_stop_ends_all_and_may_be_repeated(make: Make) -> None:
    engine, core = make(FILTERED, threading.Event())
    streams = [engine.submit(request()) for _ in range(3)]
    await wait_for_async(core.started.is_set)
    engine.stop()
    engine.stop()
    for stream in streams:
        assert_one_terminal(await read(stream), "abort")
    assert len(core.requests) == 1
    with pytest.raises(EngineDead):
        engine.submit(request())
    assert engine.death is not None


async def test_stop_gives_up_on_a_worker_that_does_not_listen() -> None:
    release = threading.Event()

    class Deaf(FakeCore):
        def step(self) -> list[tuple[FakeJob, Event]]:
            self.started.set()
            release.wait(5)
            return super().step()

    core = Deaf(FILTERED, "a")
    engine = Engine(core, max_queue=1)
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    engine.stop(timeout_s=0.05)
    with pytest.raises(EngineDead):
        engine.submit(request())
    release.set()
    assert_one_terminal(await read(stream), "abort")


def test_a_closed_event_loop_does_not_kill_the_worker() -> None:
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "a")
    engine = Engine(core, max_queue=2)

    async def submit_and_leave() -> None:
        engine.submit(request("abandoned"))

    async def submit_and_read() -> list[Event]:
        return await read(engine.submit(request()))

    asyncio.run(submit_and_leave())
    gate.set()
    wait_for(lambda: engine.num_running == 0)
    assert_one_terminal(asyncio.run(submit_and_read()), "stop")
    engine.stop()


async def test_draining_lets_running_requests_finish_and_refuses_new_ones(make: Make) -> None:
    gate = threading.Event()
    engine, core = make(FILTERED, gate, "a")
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    engine.drain(30.0)
    with pytest.raises(EngineDead, match="shutting down"):
        engine.submit(request("late"))
    gate.set()
    assert_one_terminal(await read(stream), "stop")


async def test_draining_ends_what_takes_too_long(make: Make) -> None:
    engine, core = make(FILTERED, threading.Event())
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    engine.drain(0.05)
    assert_one_terminal(await read(stream), "abort")


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_process_ends_although_its_engine_was_not_stopped(is_busy: bool) -> None:
    """It was aborted (status 134): its worker came back from torch to no interpreter."""
    script = LEFT_ALONE.replace("{is_busy}", str(is_busy))
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_an_engine_that_has_stopped_is_let_go() -> None:
    """Its core holds the model: nothing may keep it until the process ends."""
    engine = Engine(FakeCore(), max_queue=1)
    engine.stop()
    known = weakref.ref(engine)
    del engine
    gc.collect()
    assert known() is None


class SlowToAdd(FakeCore):
    """Takes in a request only when it is let: as one whose grammar is compiled for seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.is_adding, self.may_add = threading.Event(), threading.Event()

    def add(self, request: Request, plan: None = None) -> FakeJob:
        self.is_adding.set()
        assert self.may_add.wait(10)
        return super().add(request, plan)


async def test_the_queue_is_bounded_while_a_request_is_added() -> None:
    """One on its way into the core was counted nowhere, and the queue took one too many."""
    core = SlowToAdd()
    engine = Engine(core, max_queue=1)
    try:
        first = engine.submit(request("first"))
        assert core.is_adding.wait(10)
        assert engine.num_waiting == 1
        with pytest.raises(QueueFull):
            engine.submit(request("second"))
        core.may_add.set()
        assert_one_terminal(await read(first), "stop")
    finally:
        core.may_add.set()
        engine.stop(5.0)


async def test_arrivals_that_cannot_be_added_end_and_the_worker_goes_on() -> None:
    """The worker died, and clients whose requests it had not added yet waited for ever."""

    class FailsToAdd(SlowToAdd):
        def add(self, request: Request, plan: None = None) -> FakeJob:
            assert self.may_add.wait(10)
            raise RuntimeError("no grammar can be tried")

    core = FailsToAdd()
    engine = Engine(core, max_queue=4)
    streams = engine.submit_all([request("first"), request("second")])
    core.may_add.set()
    for stream in streams:
        assert "no grammar" in (assert_one_terminal(await read(stream), "error").error or "")
    assert (engine.num_waiting, engine.num_running, engine.death) == (0, 0, None)
    engine.stop(5.0)


async def test_only_the_worker_looks_into_the_core() -> None:
    """Metrics read queues while the worker changed them."""
    callers: set[int] = set()

    class Watched(FakeCore):
        @property
        def num_running(self) -> int:
            callers.add(threading.get_ident())
            return super().num_running

        @property
        def num_waiting(self) -> int:
            callers.add(threading.get_ident())
            return super().num_waiting

    engine = Engine(Watched(FILTERED, threading.Event()), max_queue=4)
    try:
        stream = engine.submit(request())
        await wait_for_async(lambda: engine.num_running == 1)
        assert (engine.num_waiting, engine.kv_usage_ratio) == (0, 0.0)
        engine.check_room()
        stream.cancel()
        assert_one_terminal(await read(stream), "abort")
        assert engine.num_running == 0
    finally:
        engine.stop(5.0)
    assert callers == {engine._worker.ident}
