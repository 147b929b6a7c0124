from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

import pytest

from gemserve.contract.events import Event
from gemserve.engine.stream import Stream, emit_all
from gemserve.engine.worker import Engine
from tests.fakes import FakeCore, Step
from tests.unit.engines import MakeEngine


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Event]]:
    """Everything the worker emitted, by request id, read or not."""
    record: dict[str, list[Event]] = defaultdict(list)

    def emit(emitted: Sequence[tuple[Stream, Event]]) -> None:
        for stream, event in emitted:
            record[stream.request.request_id].append(event)
        emit_all(emitted)

    for module in ("stream", "worker"):
        monkeypatch.setattr(f"gemserve.engine.{module}.emit_all", emit)
    return record


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    engines: list[Engine] = []

    def _make(*script: Step, max_queue: int = 4) -> tuple[Engine, FakeCore]:
        core = FakeCore(*script)
        engines.append(Engine(core, max_queue=max_queue))
        return engines[-1], core

    yield _make
    for engine in engines:
        engine.stop(5.0)
