"""Requests to engines with a fake core, and what tests check of their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gemserve.contract.events import Event, Finished
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from tests.fakes import FakeCore

MakeEngine = Callable[..., tuple[Engine, FakeCore]]


def request(name: str = "r") -> Request:
    return Request(
        request_id=name,
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        filter=FilterParams(method="none", keep=16),
        plan=FilterPlan(reason="disabled", num_kept=3, budget=Budget(low=3, high=3, limit=3)),
    )


async def read(stream: Stream, timeout_s: float = 5.0) -> list[Event]:
    async with asyncio.timeout(timeout_s):
        return [event async for event in stream]


def assert_one_terminal(events: list[Event], reason: str) -> Finished:
    terminal = [e for e in events if isinstance(e, Finished)]
    assert len(terminal) == 1
    assert events[-1] is terminal[0]
    assert terminal[0].reason == reason
    assert (terminal[0].error is not None) == (reason == "error")
    return terminal[0]
