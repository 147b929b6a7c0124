"""Keeping as much as attention asks for, and saying so when that is too little: in the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.errors import RequestError
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.sieve import Sieve
from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import ids_prompt
from gemserve.prompting.protected import plain_ranges
from tests import models
from tests.cores import core_over

pytestmark = pytest.mark.usefixtures("use_compiled_step")
PARAMS = FilterParams(method="sieve", keep="auto", fallback=True)
TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_PATH)


def build(units: int | None = None, **settings: Any) -> Core:
    model = CausalModel(models.build("llama"))
    size = model.shape.unit_bytes * units if units else 64 << 20
    config = EngineConfig(
        kv_memory_bytes=size,
        filter_min_tokens=0,
        filter_layer=1,
        max_prompt_tokens=8000,
        **settings,
    )
    return core_over(model=model, tokenizer=TOKENIZER, config=config, eos_ids=frozenset())


def serve(core: Core, params: FilterParams, count: int = 600) -> tuple[FilterReport, list[int]]:
    ids = torch.randint(3, models.VOCAB, (count,), generator=torch.Generator().manual_seed(1))
    prompt = ids_prompt(core.tokenizer, ids.tolist())
    request = Request(
        request_id="r",
        prompt_ids=prompt.ids,
        sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        filter=params,
        protected=prompt.protected,
    )
    events = list(core.run_alone(request))
    core.check_integrity()
    reports = [e.report for e in events if isinstance(e, Filtered)]
    ends = [e for e in events if isinstance(e, Finished)]
    assert [e.reason for e in ends] == ["length"], [e.error for e in ends]
    assert len(reports) == 1
    assert core.kv_bytes_used == 0
    return reports[0], [t for e in events if isinstance(e, TextDelta) for t in e.token_ids]


def test_a_diffuse_prompt_is_answered_as_if_unfiltered() -> None:
    """A random model looks everywhere."""
    core = build()
    report, tokens = serve(core, PARAMS)
    assert (report.applied, report.reason) == (False, "diffuse_attention")
    assert report.kept_tokens == 600
    assert report.coverage is not None
    whole, expected = serve(core, FilterParams(method="none", keep=16))
    assert tokens == expected
    assert whole.coverage is None
    plain, _ = serve(core, FilterParams(method="sieve", keep=64))
    assert (plain.applied, plain.reason) == (True, None)
    assert plain.protected_tokens > 0
    assert plain.kept_tokens == 64 + plain.protected_tokens


def test_what_does_not_fit_is_widened_as_far_as_it_does() -> None:
    layers = 4
    core = build(units=2 * layers * 400)
    params = FilterParams(method="sieve", keep=64, fallback=True, return_selection=True)
    report, _ = serve(core, params)
    assert (report.applied, report.reason, report.kept_tokens) == (True, "widened", 392)
    assert report.selection is not None
    assert sum(stop - start for start, stop in report.selection) == 392


def test_a_widened_request_waits_for_its_memory() -> None:
    """It asked for little: what it now needs is in use by others."""
    core = build(units=2 * 4 * 700)
    requests = []
    for seed in range(4):
        ids = torch.randint(
            3, models.VOCAB, (600,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        requests.append(
            Request(
                request_id=str(seed),
                prompt_ids=ids,
                sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
                filter=FilterParams(method="sieve", keep=64, fallback=True),
                protected=plain_ranges(600, False),
            )
        )
        core.add(requests[-1])
    ended: dict[str, str] = {}
    for _ in range(2000):
        for job, event in core.step():
            if isinstance(event, Finished):
                assert job.request.request_id not in ended
                ended[job.request.request_id] = event.reason
        core.check_integrity()
        if core.is_idle:
            break
    assert ended == {str(seed): "length" for seed in range(4)}


@pytest.mark.parametrize("method", ["gemfilter", "snapkv", "position", "random"])
def test_methods_that_cannot_tell_refuse_auto(method: Any) -> None:
    with pytest.raises(RequestError, match=r'filter.keep="auto": only method sieve'):
        serve(build(), FilterParams(method=method, keep="auto"))
    with pytest.raises(RequestError, match=r"filter.fallback=true: only method sieve"):
        serve(build(), FilterParams(method=method, keep=64, fallback=True))


@pytest.mark.parametrize("method", ["sieve", "gemfilter", "position", "random", "none"])
def test_a_selection_is_what_an_answer_would_be_generated_from(method: Any) -> None:
    core = build()
    params = FilterParams(method=method, keep=64, return_selection=True)
    expected, _ = serve(core, params)
    ids = torch.randint(3, models.VOCAB, (600,), generator=torch.Generator().manual_seed(1))
    prompt = ids_prompt(core.tokenizer, ids.tolist())
    request = Request(
        request_id="r",
        prompt_ids=prompt.ids,
        sampling=SamplingParams(max_tokens=1),
        filter=params,
        selects_only=True,
        protected=prompt.protected,
    )
    filtered, finished = core.run_alone(request)
    assert isinstance(filtered, Filtered)
    assert isinstance(finished, Finished)
    report = replace(filtered.report, filter_ms=0.0, cached_tokens=0)
    assert report == replace(expected, filter_ms=0.0)
    assert (finished.reason, finished.completion_tokens) == ("stop", 0)
    core.check_integrity()
    assert core.kv_bytes_used == 0
    job = core.add(request)
    core.check_integrity()
    ((_, ended),) = core.cancel(job)
    assert isinstance(ended, Finished)
    assert ended.reason == "abort"
    assert core.is_idle


@pytest.mark.parametrize("where", ["filter_chunk", "choose"])
@pytest.mark.parametrize("method", ["sieve", "gemfilter"])
def test_a_filter_that_fails_open_reads_everything(
    where: str, method: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of its pass or at its end; by default the request ends in an error."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    core = build(filter_on_error="full", min_chunk_tokens=128, max_chunk_tokens=128)
    monkeypatch.setattr(*((core.model, where) if where != "choose" else (Sieve, where)), fail)
    monkeypatch.setattr(*((core.model, where) if where != "choose" else (GemFilter, where)), fail)
    params = FilterParams(method=method, keep=64)
    report, tokens = serve(core, params)
    assert (report.applied, report.reason, report.kept_tokens) == (False, "error", 600)
    assert "out of memory" in caplog.text
    strict = build(max_chunk_tokens=128)
    _, expected = serve(strict, FilterParams(method="none", keep=16))
    assert tokens == expected
    monkeypatch.setattr(*((strict.model, where) if where != "choose" else (Sieve, where)), fail)
    with pytest.raises(AssertionError, match="out of memory"):
        serve(strict, params)


def test_what_cannot_fail_open_fails() -> None:
    """The whole prompt would not fit the memory."""
    core = build(units=2 * 4 * 400, filter_on_error="full")
    core._runner._choose = None  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="not callable"):
        serve(core, FilterParams(method="sieve", keep=64))
