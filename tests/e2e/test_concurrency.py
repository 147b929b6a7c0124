"""Many mixed requests at once: each gets what it would have got alone, and nothing leaks.

`GEMSERVE_TEST_REQUESTS=200` runs the full size; the default keeps the suite quick.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.step_plan import DecodeRow
from gemserve.engine.worker import Engine
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText

REQUESTS = int(os.environ.get("GEMSERVE_TEST_REQUESTS", "32"))
CONFIG = EngineConfig(
    kv_memory_bytes=24 << 20, filter_min_tokens=256, filter_layer=2, step_target_s=0.05
)


@dataclass(slots=True)
class Answer:
    report: FilterReport | None = None
    tokens: list[int] = field(default_factory=list)
    ends: list[Finished] = field(default_factory=list)

    def see(self, event: object) -> None:
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, TextDelta):
            assert not self.ends
            self.tokens += event.token_ids
        elif isinstance(event, Finished):
            self.ends.append(event)


def new_core() -> Core:
    return core_over(CausalModel(models.build("llama")), NoText(), CONFIG, eos_ids=frozenset({2}))


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    methods: tuple[FilterMethod, ...] = ("none", "gemfilter", "sieve")
    made: list[Request] = []
    for index in range(count):
        length = int(2 ** rng.uniform(6, 13))
        made.append(
            Request(
                request_id=str(index),
                prompt_ids=[rng.randrange(6, models.VOCAB) for _ in range(length)],
                sampling=SamplingParams(max_tokens=rng.randrange(1, 24), temperature=0.0),
                filter=FilterParams(
                    method=rng.choice(methods), keep=rng.choice((64, 200)), return_selection=True
                ),
            )
        )
    return made


async def answer(engine: Engine, request: Request, rng: random.Random, cancel: bool) -> Answer:
    await asyncio.sleep(rng.random() * 0.5)
    stream = engine.submit(request)
    seen = Answer()
    if cancel:
        asyncio.get_running_loop().call_later(rng.random() * 2, stream.cancel)
    async for event in stream:
        seen.see(event)
    return seen


def first_difference_is_a_tie(core: Core, request: Request, alone: Answer, other: Answer) -> bool:
    """Are the two best logits within 1e-5 of each other where the answers part?"""
    at = next(i for i, (a, b) in enumerate(zip(alone.tokens, other.tokens, strict=True)) if a != b)
    assert alone.report is not None
    assert alone.report.selection is not None
    kept = [p for low, high in alone.report.selection for p in range(low, high)]
    ids = [*(request.prompt_ids[p] for p in kept), *alone.tokens[:at]]
    memory = core.model.new_memory(2 * core.model.num_layers * len(ids))
    kv = memory.kv(0, num_layers=core.model.num_layers, capacity=len(ids))
    logits = core.model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=len(ids), is_last=True)
    assert logits is not None
    best, second = logits[0].topk(2).values.tolist()
    return best - second <= 1e-5 * float(logits.abs().max())


@pytest.mark.anyio
async def test_mixed_requests_answer_as_if_alone() -> None:
    rng = random.Random(0)
    core = new_core()
    requests = [*map(core.planner.planned, mixed_requests(rng, REQUESTS))]
    cancelled = set(rng.sample(range(REQUESTS), REQUESTS // 4))
    engine = Engine(core, max_queue=REQUESTS)
    answers = await asyncio.wait_for(
        asyncio.gather(*(answer(engine, r, rng, i in cancelled) for i, r in enumerate(requests))),
        timeout=280,
    )
    engine.stop()

    assert all(len(a.ends) == 1 for a in answers)
    core.check_integrity()
    assert core.is_idle
    assert core.kv_usage_ratio == 0
    reasons = {a.ends[0].reason for i, a in enumerate(answers) if i not in cancelled}
    assert reasons <= {"stop", "length"}

    different = 0
    lone = new_core()
    for request, seen in zip(requests, answers, strict=True):
        if seen.ends[0].reason == "abort":
            continue
        alone = Answer()
        for event in lone.run_alone(request):
            alone.see(event)
        assert alone.report is not None
        assert seen.report is not None
        assert alone.report.selection == seen.report.selection
        if alone.tokens != seen.tokens:
            different += 1
            assert first_difference_is_a_tie(lone, request, alone, seen)
    assert different <= REQUESTS // 100


def test_a_failing_sequence_ends_alone() -> None:
    """NaN logits of one request, in the middle of a batch."""
    core = new_core()
    rng = random.Random(1)
    requests = [r for r in mixed_requests(rng, 12) if r.sampling.max_tokens > 4][:4]
    jobs = [core.add(r) for r in requests]
    victim = jobs[1].sequence.order
    original = core._runner._decode_rows

    def poisoned(rows: list[DecodeRow], *rest: Any) -> torch.Tensor:
        logits = original(rows, *rest).clone()
        numbers = [row.sequence for row in rows]
        if victim in numbers:
            logits[numbers.index(victim)] = torch.nan
        return logits

    core._runner._decode_rows = poisoned  # type: ignore[method-assign,assignment]
    ends: dict[object, Finished] = {}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Finished):
                ends[job] = event
        core.check_integrity()
    assert ends[jobs[1]].reason == "error"
    assert "not finite" in str(ends[jobs[1]].error)
    assert all(ends[job].reason in ("stop", "length") for job in jobs if job is not jobs[1])


def test_a_failing_forward_ends_its_sequence_alone() -> None:
    """Out of memory while decoding together: each is tried alone, the culprit alone fails."""
    core = new_core()
    requests = [r for r in mixed_requests(random.Random(2), 12) if r.sampling.max_tokens > 4][:4]
    jobs = [core.add(r) for r in requests]
    victim = jobs[2].sequence.order
    original = core._runner._decode_rows

    def failing(rows: list[DecodeRow], *rest: Any) -> torch.Tensor:
        if victim in [row.sequence for row in rows]:
            raise RuntimeError("out of memory")
        return original(rows, *rest)

    core._runner._decode_rows = failing  # type: ignore[method-assign,assignment]
    ends: dict[object, Finished] = {}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Finished):
                ends[job] = event
    assert ends[jobs[2]].error == "RuntimeError: out of memory"
    assert all(ends[job].reason in ("stop", "length") for job in jobs if job is not jobs[2])


def test_a_batch_that_is_tried_one_by_one_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """It was swallowed without a word: a server that decodes one by one for days looks well."""
    core = new_core()
    original = core._runner._decode_rows

    def failing(rows: list[DecodeRow], *rest: Any) -> torch.Tensor:
        if len(rows) > 1:
            raise RuntimeError("no room for two")
        return original(rows, *rest)

    core._runner._decode_rows = failing  # type: ignore[method-assign,assignment]
    (made, *_) = mixed_requests(random.Random(3), 1)
    whole = FilterParams(method="none", keep=16)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    short = replace(made, prompt_ids=made.prompt_ids[:40], filter=whole, sampling=sampling)
    for name in "ab":
        core.add(replace(short, request_id=name))
    events = [event for _ in iter(lambda: core.is_idle, True) for _, event in core.step()]
    assert [e.reason for e in events if isinstance(e, Finished)] == ["length"] * 2
    assert core.internal_errors["decode_batch"] > 3
    assert caplog.text.count("decode_batch failed") == 1
    assert "no room for two" in caplog.text


def test_sampling_does_not_depend_on_the_batch() -> None:
    """Same seed, same output: alone and beside 32 others."""
    rng = random.Random(3)
    prompts = [[rng.randrange(6, models.VOCAB) for _ in range(40)] for _ in range(33)]

    def request(index: int) -> Request:
        return Request(
            request_id=str(index),
            prompt_ids=prompts[index],
            sampling=SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=index),
            filter=FilterParams(method="none", keep=64),
        )

    core = new_core()
    target = core.add(request(0))
    for index in range(1, 33):
        core.add(request(index))
    together, alone = Answer(), Answer()
    while not core.is_idle:
        for job, event in core.step():
            if job is target:
                together.see(event)
    for event in core.run_alone(request(0)):
        alone.see(event)
    assert together.tokens == alone.tokens
    assert len(alone.tokens) > 3
