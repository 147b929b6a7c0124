"""What the engine's worker does while there are no requests."""

from __future__ import annotations

import threading
import time

import pytest

from gemserve.engine.worker import Engine
from tests.fakes import FILTERED, FakeCore, wait_for_async
from tests.unit.engines import assert_one_terminal, read, request

pytestmark = pytest.mark.anyio


class Work:
    """`left` pieces of a millisecond each. It knows what the core did during each piece."""

    def __init__(self, core: FakeCore, left: int) -> None:
        self.core, self.left = core, left
        self.num_done = 0
        self.saw_requests = False
        self.threads: set[int] = set()
        self.is_abandoned = False

    def run_piece(self) -> bool:
        self.threads.add(threading.get_ident())
        self.saw_requests |= not self.core.is_idle
        time.sleep(0.001)
        self.num_done += 1
        return self.num_done >= self.left

    def abandon(self) -> None:
        self.threads.add(threading.get_ident())
        self.is_abandoned = True


async def test_it_is_done_between_requests_only() -> None:
    gate = threading.Event()
    core = FakeCore(FILTERED, "a", gate, "b")
    work = Work(core, left=200)
    engine = Engine(core, max_queue=4, idle_work=work)
    try:
        await wait_for_async(lambda: work.num_done > 2)
        streams = [engine.submit(request("first")), engine.submit(request("second"))]
        await wait_for_async(core.started.is_set)
        before = work.num_done
        time.sleep(0.05)
        assert work.num_done == before
        assert engine.has_idle_work
        gate.set()
        for stream in streams:
            assert_one_terminal(await read(stream), "stop")
        await wait_for_async(lambda: not engine.has_idle_work)
        assert work.num_done == 200
        assert not work.saw_requests
        turn = engine.turn
        time.sleep(0.02)
        assert engine.turn == turn is None  # the worker sleeps again
    finally:
        engine.stop(5.0)
    assert not work.is_abandoned
    assert work.threads == {engine.thread_id}


async def test_a_server_that_stops_abandons_it_in_the_worker() -> None:
    """What is paused in a thread can only be unwound there."""
    core = FakeCore()
    work = Work(core, left=1_000_000)
    engine = Engine(core, max_queue=4, idle_work=work)
    await wait_for_async(lambda: work.num_done > 2)
    began_s = time.monotonic()
    engine.stop(5.0)
    assert time.monotonic() - began_s < 1
    assert work.is_abandoned
    assert work.threads == {engine.thread_id}
    assert engine.death == "shut down"
