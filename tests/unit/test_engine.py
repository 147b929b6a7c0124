"""The engine's promises: one terminal event each, a bounded queue, no request left hanging."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from gemserve.api.routes.submission import Preparing
from gemserve.contract.events import Event, Finished
from gemserve.contract.requests import Request
from gemserve.decoding.sampling import InvalidLogits
from gemserve.engine.worker import Engine
from gemserve.errors import EngineDead, QueueFull
from tests.fakes import FILTERED, FakeCore, FakeJob, Step, wait_for_async
from tests.unit.engines import MakeEngine, assert_one_terminal, read, request

pytestmark = pytest.mark.anyio


async def test_a_finished_request_ends_once(
    make_engine: MakeEngine, emitted: dict[str, list[Event]]
) -> None:
    engine, _ = make_engine(FILTERED, "a", "b")
    events = await read(engine.submit(request()))
    engine.stop()
    assert assert_one_terminal(events, "stop").completion_tokens == 2
    assert emitted["r"] == events


@pytest.mark.parametrize(
    "script",
    [(ValueError("boom"),), (FILTERED, "a", ValueError("boom")), (InvalidLogits("NaN"),)],
)
async def test_a_failing_request_fails_alone(
    make_engine: MakeEngine, script: tuple[Step, ...], emitted: dict[str, list[Event]]
) -> None:
    engine, core = make_engine(*script)
    end = assert_one_terminal(await read(engine.submit(request())), "error")
    assert type(script[-1]).__name__ in (end.error or "")
    assert end.completion_tokens == script.count("a")
    core.script = (FILTERED, "fine")
    assert_one_terminal(await read(engine.submit(request("next"))), "stop")
    engine.stop()
    assert len([e for e in emitted["r"] if isinstance(e, Finished)]) == 1


async def test_cancelled_while_queued_never_runs(make_engine: MakeEngine) -> None:
    gate = threading.Event()
    engine, core = make_engine(FILTERED, gate)
    first, second = engine.submit(request("first")), engine.submit(request("second"))
    await wait_for_async(core.started.is_set)
    second.cancel()
    second.cancel()
    gate.set()
    assert_one_terminal(await read(second), "abort")
    assert_one_terminal(await read(first), "stop")
    assert [r.request_id for r in core.requests] == ["first"]


async def test_cancelled_while_queued_frees_its_place_at_once(make_engine: MakeEngine) -> None:
    """Else clients that gave up keep the queue full for those still there."""
    engine, core = make_engine(threading.Event(), max_queue=1)
    engine.submit(request("running"))
    await wait_for_async(core.started.is_set)
    waiting = engine.submit(request("waiting"))
    waiting.cancel()
    assert_one_terminal(await read(waiting, timeout_s=1), "abort")
    assert engine.num_waiting == 0
    engine.submit(request("later"))


async def test_cancelled_while_running_stops_soon(make_engine: MakeEngine) -> None:
    engine, core = make_engine(FILTERED, "a", threading.Event())
    stream = engine.submit(request())
    await wait_for_async(core.started.is_set)
    await asyncio.sleep(0.02)
    stream.cancel()
    assert assert_one_terminal(await read(stream), "abort").completion_tokens == 1
    assert core.cancelled.is_set()


async def test_cancelled_after_the_end_harms_nobody(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FILTERED, "a")
    stream = engine.submit(request())
    await read(stream)
    stream.cancel()
    assert_one_terminal(await read(engine.submit(request())), "stop")


async def test_a_dead_worker_ends_every_request(
    make_engine: MakeEngine, emitted: dict[str, list[Event]]
) -> None:
    gate = threading.Event()
    engine, _ = make_engine(FILTERED, "a", gate, SystemExit("cuda is gone"))
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


async def test_a_full_queue_has_places_for_other_keys(make_engine: MakeEngine) -> None:
    """A key that sent more than the server can do made it refuse everybody."""
    gate = threading.Event()
    engine, core = make_engine(FILTERED, gate, max_queue=8)
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


async def test_what_is_on_its_way_counts_as_its_key_s(make_engine: MakeEngine) -> None:
    """While nothing waits in the engine, one key's texts took all places of the queue."""
    engine, _ = make_engine(FILTERED, max_queue=8)
    preparing = Preparing()
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(preparing.one_more(engine, b"greedy"))
        with pytest.raises(QueueFull, match="6 requests of this API key wait"):
            stack.enter_context(preparing.one_more(engine, b"greedy"))
        for tenant in (b"polite", b"third"):
            stack.enter_context(preparing.one_more(engine, tenant))
        with pytest.raises(QueueFull):
            stack.enter_context(preparing.one_more(engine, b"fourth"))
    with preparing.one_more(engine, b"greedy"):
        pass


async def test_the_queue_is_bounded(make_engine: MakeEngine) -> None:
    gate = threading.Event()
    engine, core = make_engine(FILTERED, gate, max_queue=2)
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


async def test_requests_run_in_order_of_arrival(make_engine: MakeEngine) -> None:
    engine, core = make_engine(FILTERED, "a", max_queue=8)
    for stream in [engine.submit(request(str(i))) for i in range(8)]:
        await read(stream)
    assert [r.request_id for r in core.requests] == [str(i) for i in range(8)]


class SlowToAdd(FakeCore):
    """Takes in a request only when it is let: as one whose grammar is compiled for seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.is_adding, self.may_add = threading.Event(), threading.Event()

    def add(self, request: Request) -> FakeJob:
        self.is_adding.set()
        assert self.may_add.wait(10)
        return super().add(request)


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
        def add(self, request: Request) -> FakeJob:
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
