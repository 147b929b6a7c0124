"""The watchdog: a step that hangs is noticed, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gemserve.engine.watchdog import Watchdog
from gemserve.engine.worker import Engine
from tests.fakes import COMPLETIONS, FILTERED, FakeCore, FakeJob, api_over, data_of, wait_for_async


class HangingCore(FakeCore):
    """Hangs in its second step until `gate` is set."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(FILTERED, "a", "b")
        self.gate = gate
        self.num_steps = 0

    def step(self) -> list[tuple[FakeJob, Any]]:
        self.num_steps += 1
        if self.num_steps == 2:
            self.gate.wait(60)
        return super().step()


@contextmanager
def watched(limit_s: float = 100.0) -> Iterator[tuple[Any, Watchdog]]:
    """An engine whose turns the test sets, and a watchdog that looks when it is told to."""
    engine: Any = SimpleNamespace(turn=None, death=None, thread_id=0)
    watchdog = Watchdog(engine, limit_s)
    watchdog.stop()
    yield engine, watchdog


def looks(watchdog: Watchdog, seconds: int) -> None:
    for _ in range(seconds):
        watchdog.look(1.0)


def test_only_a_turn_that_does_not_end_is_stuck() -> None:
    with watched() as (engine, watchdog):
        looks(watchdog, 200)  # an engine without work
        assert not watchdog.is_stuck
        for turn in range(200):  # many turns, for example the slices of one long prompt
            engine.turn = turn
            looks(watchdog, 50)
            assert not watchdog.is_stuck
        looks(watchdog, 60)
        assert watchdog.is_stuck
        assert "no step has ended for" in watchdog.complaint
        engine.turn += 1
        looks(watchdog, 1)
        assert not watchdog.is_stuck


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    """After SIGSTOP the clock has gone on, but nothing could have been done."""
    with watched() as (engine, watchdog):
        engine.turn = 1
        looks(watchdog, 2)
        watchdog.look(3600.0)
        assert not watchdog.is_stuck


@pytest.mark.anyio
async def test_health_fails_while_a_step_hangs_and_recovers(tokenizer: Any) -> None:
    gate = threading.Event()
    async with api_over(HangingCore(gate), tokenizer, watchdog_s=0.2) as api:
        assert (await api.client.get("/health")).status_code == 200
        post = asyncio.create_task(api.post(COMPLETIONS, stream=True))
        watchdog = api.serving.watchdog
        assert watchdog is not None
        await wait_for_async(lambda: watchdog.is_stuck)
        for path in ("/health", "/ready"):
            reply = await api.client.get(path)
            assert reply.status_code == 503
            assert reply.json()["status"] == "stuck"
            assert "--watchdog allows 0.2 s" in reply.json()["cause"]
        gate.set()
        chunks = data_of(await post)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        await wait_for_async(lambda: not watchdog.is_stuck)
        assert (await api.client.get("/health")).status_code == 200


def test_an_engine_that_ends_takes_its_watchdog_along() -> None:
    engine = Engine(FakeCore(), max_queue=1)
    watchdog = Watchdog(engine, 0.1)
    engine.stop()
    assert engine.turn is None
    assert not watchdog.is_stuck
