"""Progress chunks: what a stream says while its prompts wait and are read."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from gemserve.api.replies import progress
from gemserve.engine.sequence.progress import Progress
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    live_server,
    serving_over,
    text_of,
)

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
ASKED: dict[str, Any] = {"stream": True, "stream_options": {"include_progress": True}}


def reading(tokens: int, phase: Any = "filter", eta_s: float | None = 1.5) -> Progress:
    return Progress(phase=phase, tokens=tokens, total=100, cached=10, eta_s=eta_s)


def progress_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["progress"] for chunk in chunks if "progress" in chunk]


@both
async def test_it_comes_at_once_and_ends_with_the_first_token(
    api: Api, core: FakeCore, path: str
) -> None:
    core.script = (reading(20), 0.6, FILTERED, reading(60, "prefill"), 0.4, "a", 0.6, "b")
    chunks = data_of(await api.post(path, **ASKED))
    sent = progress_of(chunks)
    assert sent[0]["phase"] in ("queue", "filter")  # the first look is before the first step
    assert {"phase": "filter", "tokens": 20, "total": 100, "eta_ms": 1500} in sent
    assert sent[-1] == {"phase": "prefill", "tokens": 60, "total": 100, "eta_ms": 1500}
    assert all(chunk["choices"] == [] for chunk in chunks if "progress" in chunk)
    last = max(index for index, chunk in enumerate(chunks) if "progress" in chunk)
    assert text_of(chunks[:last]) == ""
    assert text_of(chunks) == "ab"
    assert all(chunk["id"] == chunks[0]["id"] for chunk in chunks)


@both
async def test_nobody_gets_it_unasked(api: Api, core: FakeCore, path: str) -> None:
    core.script = (reading(20), 0.4, FILTERED, "a")
    for options in ({}, {"stream_options": {"include_progress": None}}, {"return_progress": False}):
        chunks = data_of(await api.post(path, stream=True, **options))
        assert not progress_of(chunks)
    whole = await api.post(path, return_progress=True)  # llama.cpp ignores it there, too
    assert (whole.status_code, "progress" in whole.json()) == (200, False)


async def test_llama_cpp_s_clients_find_their_own_form(api: Api, core: FakeCore) -> None:
    core.script = (reading(20), 0.4, FILTERED, "a")
    chunks = data_of(await api.post(CHAT, stream=True, return_progress=True))
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(told) == len(progress_of(chunks)) > 0
    assert set(told[0]) == {"total", "cache", "processed", "time_ms"}
    assert (told[-1]["cache"], told[-1]["processed"], told[-1]["total"]) == (10, 20, 100)
    plain = data_of(await api.post(CHAT, **ASKED))
    assert not [chunk for chunk in plain if "prompt_progress" in chunk]


async def test_a_queued_request_says_that_it_waits(tokenizer: Any) -> None:
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "a")
    async with api_over(core, tokenizer) as api:
        first = asyncio.create_task(api.post(COMPLETIONS))
        await asyncio.to_thread(core.started.wait, 5)
        second = asyncio.create_task(api.post(COMPLETIONS, **ASKED))
        await asyncio.sleep(0.5)
        gate.set()
        chunks = data_of(await second)
        assert (await first).status_code == 200
    (number,) = {p["total"] for p in progress_of(chunks) if p["total"] != 100}
    assert progress_of(chunks)[0] == {
        "phase": "queue",
        "tokens": 0,
        "total": number,
        "eta_ms": None,
    }


async def test_the_rate_is_bounded(api: Api, core: FakeCore) -> None:
    """A core that advances a thousand times a second must not send a thousand chunks."""
    steps = [step for tokens in range(100) for step in (reading(tokens), 0.01)]
    core.script = (*steps, FILTERED, "a")
    began_s = time.monotonic()
    sent = progress_of(data_of(await api.post(CHAT, **ASKED)))
    took_s = time.monotonic() - began_s
    assert 2 <= len(sent) <= took_s * 4 + 2
    assert [p["tokens"] for p in sent] == sorted(p["tokens"] for p in sent)


async def test_standing_still_is_told_now_and_then(
    api: Api, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_REPEAT_S", 0.5)
    core.script = (reading(20), 1.6, FILTERED, "a")
    sent = progress_of(data_of(await api.post(CHAT, **ASKED)))
    assert 2 <= sum(p["tokens"] == 20 for p in sent) <= 4


async def test_silence_after_it_is_filled(tokenizer: Any) -> None:
    """Its short pauses must not become the rhythm of empty chunks, nor must these stop."""
    core = FakeCore(reading(20), 0.3, FILTERED, "a", 1.0, "b")
    async with api_over(core, tokenizer, keep_alive_s=0.4) as api:
        text = (await api.post(CHAT, **ASKED)).text
    idle = '"delta": {}, "logprobs": null, "finish_reason": null'
    assert 1 <= text.count(idle) <= 3
    assert text.index(idle) > text.index('"a"')


async def test_of_several_choices_the_first_to_answer_counts(api: Api, core: FakeCore) -> None:
    core.script = (reading(20), 0.5, FILTERED, "a")
    chunks = data_of(await api.post(COMPLETIONS, n=2, **ASKED))
    assert progress_of(chunks)[-1]["tokens"] == 20  # not that of the choice in the queue
    first = next(index for index, chunk in enumerate(chunks) if text_of([chunk]))
    assert not progress_of(chunks[first:])


async def test_a_failure_ends_it(api: Api, core: FakeCore) -> None:
    core.script = (reading(20), 0.3, ValueError("boom"))
    chunks = data_of(await api.post(CHAT, **ASKED))
    assert "error" in chunks[-1]
    assert progress_of(chunks)


def test_leaving_after_the_first_progress_ends_the_request(tokenizer: Any) -> None:
    """A stream whose first chunk came before its events were read had nobody to cancel it."""
    core = FakeCore(threading.Event())
    with live_server(serving_over(core, tokenizer)) as url:
        body = {"model": "fake", "prompt": "x", **ASKED}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=10) as reply:
            lines = reply.iter_lines()  # kept: a generator that is let go closes the connection
            line = next(lines)
            assert json.loads(line.removeprefix("data: "))["progress"]
            assert core.started.wait(5)  # what is cancelled before that never reaches the core
        assert core.cancelled.wait(5)
