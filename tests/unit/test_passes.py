"""A pass left in the middle and taken up again is the pass run at once."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.running.passes import Pass, device_queue
from gemserve.errors import RequestError
from gemserve.model.passes.attention import Breaks
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText

no_device = device_queue(torch.device("cpu"))


def test_a_pass_is_left_at_every_break_once_its_time_is_up() -> None:
    seen: list[int] = []

    def forward(breaks: Breaks) -> torch.Tensor:
        for i in range(3):
            seen.append(i)
            breaks.pause()
        return torch.tensor([7])

    under_way = Pass(forward, piece=1, catch_up=no_device)
    for steps in range(1, 4):
        assert not under_way.run(0.0)
        assert seen == list(range(steps))
    assert under_way.run(0.0)
    assert under_way.result is not None
    assert under_way.result.tolist() == [7]


def test_a_pass_with_time_is_not_left() -> None:
    def forward(breaks: Breaks) -> None:
        for _ in range(100):
            breaks.pause()

    assert Pass(forward, piece=1, catch_up=no_device).run(60.0)


def test_a_pass_waits_for_a_device_that_is_behind() -> None:
    """A GPU's work seemed to be done as soon as it was asked for: slices had no end."""
    asked, done = [0.0], [0.0]  # seconds of work, for a device that works in `catch_up` alone

    def forward(breaks: Breaks) -> None:
        for _ in range(100):
            asked[0] += 0.01
            breaks.pause()

    def catch_up() -> None:
        time.sleep(asked[0] - done[0])
        done[0] = asked[0]

    under_way = Pass(forward, piece=1, catch_up=catch_up)
    assert not under_way.run(0.1)
    assert 0 < asked[0] <= 0.12
    assert under_way.spent_s >= asked[0]


def test_what_a_pass_raises_comes_out_of_its_slice() -> None:
    def forward(breaks: Breaks) -> None:
        breaks.pause()
        raise RuntimeError("out of memory")

    under_way = Pass(forward, piece=1, catch_up=no_device)
    assert not under_way.run(0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        under_way.run(0.0)
    under_way.abandon()


def test_an_abandoned_pass_unwinds() -> None:
    """Nothing of it stays behind: what it had entered is left."""
    left: list[bool] = []

    def forward(breaks: Breaks) -> None:
        try:
            breaks.pause()
        finally:
            left.append(True)

    under_way = Pass(forward, piece=1, catch_up=no_device)
    under_way.run(0.0)
    under_way.abandon()
    under_way.abandon()
    assert left == [True]
    Pass(forward, piece=1, catch_up=no_device).abandon()  # one that never began


def test_an_abandoned_pass_leaves_inference_mode_as_it_was() -> None:
    """Else whoever cancels a request computes no gradients from then on."""

    @torch.inference_mode()
    def forward(breaks: Breaks) -> None:
        breaks.pause()

    under_way = Pass(forward, piece=1, catch_up=no_device)
    with torch.inference_mode():
        under_way.run(0.0)
    under_way.abandon()
    assert not torch.is_inference_mode_enabled()


def answers(core: Core, requests: list[Request]) -> dict[str, list[int]]:
    jobs = {core.add(request): request.request_id for request in requests}
    tokens: dict[str, list[int]] = {name: [] for name in jobs.values()}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                tokens[jobs[job]] += event.token_ids
            elif isinstance(event, Finished):
                assert event.error is None, event.error
        core.check_integrity()
    return tokens


def new_core(**settings: Any) -> Core:
    config = EngineConfig(filter_min_tokens=0, filter_layer=2, **settings)
    return core_over(CausalModel(models.build("llama")), NoText(), config, eos_ids=frozenset())


def test_slices_of_any_length_give_the_same_answers() -> None:
    """Every break taken, several passes under way at once, memory compacted beneath them."""
    rng = random.Random(0)
    methods = ("none", "gemfilter", "sieve", "snapkv", "position", "random")
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=[rng.randrange(6, models.VOCAB) for _ in range(rng.randrange(100, 900))],
            sampling=SamplingParams(max_tokens=rng.randrange(1, 12), temperature=0.0),
            filter=FilterParams(method=rng.choice(methods), keep=80),
        )
        for i in range(14)
    ]
    whole = new_core(kv_memory_bytes=64 << 20, step_target_s=60.0)
    expected = {r.request_id: answers(whole, [r])[r.request_id] for r in requests}
    # room for a few at a time
    sliced = new_core(kv_memory_bytes=2 << 20, step_target_s=1e-9, min_chunk_tokens=64)
    assert answers(sliced, requests) == expected
    assert sliced.kv_usage_ratio == 0
    assert not sliced._runner._states


def test_an_eviction_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had its token already, and ended twice: the second end killed the worker."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("gemserve.filtering.snapkv.SnapKV.select", fail)
    core = new_core(kv_memory_bytes=8 << 20)
    request = Request(
        request_id="r",
        prompt_ids=list(range(6, 206)),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        filter=FilterParams(method="snapkv", keep=64),
    )
    (end,) = core.run_alone(request)
    assert isinstance(end, Finished)
    assert end.error == "RuntimeError: out of memory"
    assert core.kv_usage_ratio == 0


def test_eviction_is_refused_where_layers_have_windows() -> None:
    config = EngineConfig(filter_min_tokens=0, filter_layer=2, kv_memory_bytes=8 << 20)
    model = CausalModel(models.build("mistral-window"))
    core = core_over(model, NoText(), config, eos_ids=frozenset())
    request = Request(
        request_id="r",
        prompt_ids=list(range(6, 96)),
        sampling=SamplingParams(max_tokens=60, temperature=0.0),
        filter=FilterParams(method="snapkv", keep=64),
    )
    with pytest.raises(RequestError, match=r"filter\.method=snapkv: not for this model: 4 of"):
        core.add(request)
