"""`filter.max_seconds`: the best candidates of a library are read until the time is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.config import ServerConfig
from gemserve.contract.events import Finished, SegmentsRead
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan, Segment, SegmentPlan
from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.errors import GemserveError, RequestError
from gemserve_library.api.timed_reading import read_in_time
from tests.library.served import build_core, serve_libraries
from tests.library.worlds import paragraphs

pytestmark = pytest.mark.anyio
QUESTION = "When does the ferry to Malmo leave?"


@dataclass
class SlowEngine:
    """Takes `seconds` for each request."""

    seconds: float
    last: Finished = field(
        default_factory=lambda: Finished(
            reason="stop",
            completion_tokens=0,
            segments_read=SegmentsRead(summaries=(), num_cached=0, cached_tokens=0),
        )
    )
    requests: list[Request] = field(default_factory=list)
    num_done: int = 0

    async def read(self, request: Request) -> Finished:
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        self.num_done += 1
        return self.last


def request_of(num_excerpts: int, *, has_segments: bool = True) -> Request:
    """Excerpts of 100 tokens each, the best last."""
    size, count = 100, 100 * num_excerpts
    segments = [
        Segment(start=at, stop=at + size, name=bytes([at // size])) for at in range(0, count, size)
    ]
    reading = SegmentPlan(size=size, anchor=(1,), asked=(2,), segments=tuple(segments))
    return Request(
        request_id="r",
        prompt_ids=list(range(count)),
        sampling=SamplingParams(max_tokens=1),
        filter=FilterParams(method="sieve", keep=64),
        excerpts=tuple(
            Excerpt(
                library="notes",
                file=f"{number}",
                file_id=f"id-{number}",
                kind="text",
                heading="",
                first_line=1,
                first_character=0,
                pages=(),
                text="",
                rank=num_excerpts - 1 - number,
                start=segment.start,
                stop=segment.stop,
                characters=np.zeros(size, dtype=np.int64),
            )
            for number, segment in enumerate(segments)
        ),
        plan=FilterPlan(
            reason=None,
            num_kept=1,
            budget=Budget(low=1, high=1, limit=1),
            layer=1,
            segments=reading if has_segments else None,
        ),
    )


async def test_the_best_are_read_first_and_the_deadline_holds() -> None:
    engine, began_s = SlowEngine(seconds=0.05), time.monotonic()
    read = await read_in_time(request_of(100), engine.read, began_s + 0.4)
    assert time.monotonic() - began_s < 0.4 + 0.25  # 0.25: this machine may be busy
    assert read == frozenset(range(len(read)))
    assert 1 <= len(read) <= 8
    sent = engine.requests
    assert [request.request_id for request in sent[:2]] == ["r-read0", "r-read1"]
    assert sent[0].documents == ("id-99",)
    assert sent[0].summarizes_only
    for request in sent:
        assert request.plan is not None
        assert request.plan.segments is not None
        assert len(request.plan.segments.segments) == 1
    assert engine.num_done == len(read)


async def test_one_that_takes_too_long_is_ended_and_counts_as_unread() -> None:
    engine, began_s = SlowEngine(seconds=30), time.monotonic()
    assert await read_in_time(request_of(3), engine.read, began_s + 0.1) == frozenset()
    assert time.monotonic() - began_s < 5
    assert (len(engine.requests), engine.num_done) == (1, 0)


async def test_time_that_is_over_reads_nothing() -> None:
    engine = SlowEngine(seconds=0)
    assert await read_in_time(request_of(3), engine.read, time.monotonic()) == frozenset()
    assert not engine.requests


async def test_failures_and_other_ways_of_reading_are_told() -> None:
    failed = Finished(reason="error", completion_tokens=0, error="no memory")
    later_s = time.monotonic() + 5
    with pytest.raises(GemserveError, match="no memory"):
        await read_in_time(request_of(3), SlowEngine(seconds=0, last=failed).read, later_s)
    request = request_of(3, has_segments=False)
    with pytest.raises(RequestError, match=r"filter\.max_seconds: only where documents"):
        await read_in_time(request, SlowEngine(seconds=0).read, later_s)


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core()


@pytest.fixture
async def client(core: Core, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_libraries(core, tmp_path) as made:
        await made.post("/v1/libraries", json={"name": "notes"})
        for number in range(6):
            fact = f"The ferry to Malmo leaves at {number}."
            text = f"{paragraphs(60, f'w{number}')}\n\n{fact}\n\n{paragraphs(20, f'v{number}')}"
            body = {"path": f"{number}.md", "text": text}
            reply = await made.post("/v1/libraries/notes/files?wait=true", json=body)
            assert reply.json()["status"] == "ready"
        yield made


async def ask(client: httpx.AsyncClient, status: int = 200, **fields: Any) -> Any:
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 4,
        "temperature": 0,
        "filter": {"library": "notes", "candidates": 6, "keep": 256, "fallback": False, **fields},
    }
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_an_answer_in_time_is_that_without_a_limit(client: httpx.AsyncClient) -> None:
    """What was read before is found in the cache, and not read again."""
    timed = await ask(client, max_seconds=60)
    report = timed["filter"]
    assert report["searched"]["read"] == report["searched"]["candidates"] > 1
    assert report["cached_windows"] == report["windows"]
    free = await ask(client)
    assert free["choices"][0]["message"] == timed["choices"][0]["message"]
    assert free["filter"]["sources"] == report["sources"]


async def test_without_a_cache_it_is_refused(core: Core, tmp_path: Path) -> None:
    """The answer would read everything again, and no time would hold."""
    config = ServerConfig(library_dir=str(tmp_path / "libraries"))
    serving = build_serving(core, model_name="builtin", config=config)
    without = replace(serving, engine_config=lambda: replace(core.config, cache_memory=0))
    transport = httpx.ASGITransport(create_app(without), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
            await made.post("/v1/libraries", json={"name": "notes"})
            error = (await ask(made, 400, max_seconds=5))["error"]
    finally:
        serving.engine.stop()
    assert error["param"] == "filter.max_seconds"
    assert "--cache-memory" in error["message"]


async def test_without_time_nothing_is_found(client: httpx.AsyncClient) -> None:
    report = (await ask(client, max_seconds=1e-6))["filter"]
    assert report["searched"]["candidates"] > 1
    assert report["searched"]["read"] == 0
    assert report["found"] is False
    assert report["sources"] == []


async def test_a_part_of_the_candidates_is_answered_from(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_two(request: Request, *_: Any) -> frozenset[int]:
        return frozenset((0, 2))

    monkeypatch.setattr("gemserve_library.api.excerpt_finder.read_in_time", read_two)
    everything = (await ask(client))["filter"]
    report = (await ask(client, max_seconds=5))["filter"]
    assert report["searched"]["read"] == 2
    assert report["searched"]["candidates"] == everything["searched"]["candidates"]
    assert {source["file"] for source in report["sources"]} < {f"{n}.md" for n in range(6)}
    assert len({source["file"] for source in report["sources"]}) <= 2
    assert report["windows"] is None or report["windows"] == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_seconds": 0}, "greater than 0"),
        ({"max_seconds": 5, "library": None}, "only with filter.library"),
        ({"max_seconds": 5, "window": "off"}, "only where documents are read in windows"),
    ],
)
async def test_bad_limits_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    error = (await ask(client, 400, **fields))["error"]
    assert error["param"] == "filter.max_seconds"
    assert message in error["message"]
