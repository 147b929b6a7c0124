"""Plans and results are data: a runner in a process of its own gives the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.events import Event, Filtered, Finished, PromptScored, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cache_world import RandomPace, World
from tests.cores import core_over
from tests.model.cache_traces import Trace
from tests.model.test_selection import NoText

CONFIG = EngineConfig(
    kv_memory_bytes=16 << 20, filter_min_tokens=64, filter_layer=2, min_chunk_tokens=32
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """OpenMP's threads do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def core_of(monkeypatch: pytest.MonkeyPatch, is_piped: bool) -> Core:
    with monkeypatch.context() as patch:
        patch.setenv("GEMSERVE_TEST_RUNNER", "pipe" if is_piped else "")
        model = CausalModel(models.build("llama"))
        core = core_over(model, NoText(), CONFIG, eos_ids=frozenset())
    core._pace = RandomPace(None, 1.0)  # type: ignore[assignment]  # the clock decides nothing
    return core


def every_kind() -> list[Request]:
    """A request of every filter method, and of everything that the runner does besides."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(3, models.VOCAB, (700,), generator=generator).tolist()
    made: list[Request] = []
    for method in ("none", "sieve", "gemfilter", "snapkv", "position", "random"):
        params = FilterParams(method=method, keep=64, return_selection=True)
        sampling = SamplingParams(max_tokens=9, temperature=0.8, seed=len(made), logprobs=2)
        made.append(Request(request_id=method, prompt_ids=ids, sampling=sampling, filter=params))
    whole, sieve = made[0], made[1]
    scores = replace(sieve.filter, return_scores=True, return_attention=True)
    made.append(replace(sieve, filter=scores, request_id="scores"))
    made.append(replace(whole, prompt_logprobs=1, request_id="scored", prompt_ids=ids[:300]))
    penalised = replace(
        whole.sampling, repetition_penalty=1.3, logit_bias=((5, 2.0),), stop=("t7",)
    )
    made.append(replace(whole, sampling=penalised, request_id="penalties"))
    return made


def answers(core: Core, requests: list[Request]) -> dict[str, list[object]]:
    """What each request gets when all run at once, and some of them once more: without times."""
    found: dict[str, list[object]] = {}
    for _ in range(2):  # the second time from the document cache
        jobs = {core.add(request): request.request_id for request in requests}
        while not core.is_idle:
            for job, event in core.step():
                found.setdefault(jobs[job], []).append(timeless(event))
            core.check_integrity()
    return found


def timeless(event: Event) -> object:
    if isinstance(event, Filtered):
        return replace(event.report, filter_ms=0.0)
    if isinstance(event, TextDelta):
        return event.text, event.token_ids, event.logprobs
    assert isinstance(event, (Finished, PromptScored))
    if isinstance(event, Finished):
        assert event.error is None, event.error
    return event


def test_every_kind_of_request_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = (core_of(monkeypatch, is_piped) for is_piped in (False, True))
    expected = answers(near, every_kind())
    assert answers(far, every_kind()) == expected
    assert {"sieve", "snapkv", "scores", "scored"} <= expected.keys()


@pytest.mark.slow
def test_interleavings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters, cancellations, compaction, deletions and a cache folder, all through the pipe."""
    monkeypatch.setenv("GEMSERVE_TEST_RUNNER", "pipe")
    world = World(tmp_path)
    hits = sum(Trace(world, seed).run().hits for seed in range(3, 8))
    assert hits > 3


def test_errors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(monkeypatch, True)
    with pytest.raises(KeyError, match="99"):
        core._runner.watched_answer(99, [])
    assert answers(core, every_kind()[:1])
