"""How an engine ends: every request gets its last event, and neither thread nor model is left."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from gemserve.contract.events import Event
from gemserve.engine.worker import Engine
from gemserve.errors import EngineDead
from tests.fakes import FILTERED, FakeCore, FakeJob, wait_for, wait_for_async
from tests.unit.engines import MakeEngine, assert_one_terminal, read, request

pytestmark = pytest.mark.anyio
LEFT_ALONE = """
import asyncio
import torch
from gemserve.engine.worker import Engine
from tests.fakes import FakeCore
from tests.unit.engines import request

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


async def test_stop_ends_all_and_may_be_repeated(make_engine: MakeEngine) -> None:
    engine, core = make_engine(FILTERED, threading.Event())
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


@pytest.mark.parametrize("is_failing", [False, True])
async def test_last_events_count_tokens_and_do_not_wait_for_the_disk(
    make_engine: MakeEngine, is_failing: bool
) -> None:
    """They said 0 tokens, came after a disk that hung, and never if closing it failed."""
    engine, core = make_engine("a", "b", "c", threading.Event())
    is_told = threading.Event()

    def close() -> None:
        assert is_told.wait(10)
        if is_failing:
            raise OSError("the disk is gone")

    core.close = close  # type: ignore[method-assign]
    stream = engine.submit(request())
    events: list[Event] = []
    async with asyncio.timeout(5):
        async for event in stream:
            events.append(event)
            if len(events) == 3:
                engine.stop(0.0)
    is_told.set()
    assert assert_one_terminal(events, "abort").completion_tokens == 3


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


async def test_draining_lets_running_requests_finish_and_refuses_new_ones(
    make_engine: MakeEngine,
) -> None:
    gate = threading.Event()
    engine, core = make_engine(FILTERED, gate, "a")
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    engine.drain(30.0)
    with pytest.raises(EngineDead, match="shutting down"):
        engine.submit(request("late"))
    gate.set()
    assert_one_terminal(await read(stream), "stop")


async def test_draining_ends_what_takes_too_long(make_engine: MakeEngine) -> None:
    engine, core = make_engine(FILTERED, threading.Event())
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
