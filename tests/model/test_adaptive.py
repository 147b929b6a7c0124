"""Keeping as much as attention asks for, and saying so when that is too little."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gemserve.calibration import Calibration
from gemserve.config import EngineConfig
from gemserve.engine.core import Core
from gemserve.engine.prompt import ids_prompt
from gemserve.errors import RequestError
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.spans import plain_spans
from gemserve.model.causal import CausalModel
from gemserve.model.loader import BUILTIN_PATH
from gemserve.types import (
    Budget,
    Filtered,
    FilterParams,
    FilterReport,
    Finished,
    Priority,
    Request,
    SamplingParams,
    Span,
    TextDelta,
)
from gemserve_kernels import select_backend
from tests import models

NUM_TOKENS = 1024
PARAMS = FilterParams(method="sieve", keep="auto", fallback=True)
TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_PATH)
BUDGET = Budget(low=64, high=256, limit=NUM_TOKENS)


def evidence(*spots: int, sharpness: float = 30.0) -> Evidence:
    """Two heads over random keys: the calibrated one looks at `spots`, the other everywhere."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, NUM_TOKENS, 32, generator=generator) * 0.05
    queries = torch.zeros(2, 16, 32)
    queries[0, :, 0] = sharpness
    keys[0, list(spots), 0] = 1.0
    layer = LayerEvidence(queries=queries, keys=keys, scale=1.0, softcap=None)
    return Evidence(
        num_tokens=NUM_TOKENS,
        layers={0: layer},
        rows=range(NUM_TOKENS - 16, NUM_TOKENS),
        backend=select_backend(keys.device),
        protected=plain_spans(NUM_TOKENS, True),
        heads=((0, 0),),
        coverage_bound=Calibration.GUESSED_BOUND,
    )


def test_auto_keeps_little_where_attention_is_focused() -> None:
    one = Sieve().choose(evidence(300), BUDGET, PARAMS)
    several = Sieve().choose(evidence(100, 300, 500, 700), BUDGET, PARAMS)
    for choice, spots in ((one, [300]), (several, [100, 300, 500, 700])):
        kept = choice.positions.tolist()
        assert not choice.is_diffuse
        assert choice.coverage is not None
        assert choice.coverage > 0.95
        assert set(spots) <= set(kept)
        assert BUDGET.low <= len(kept) <= BUDGET.high
        assert kept == sorted(set(kept))
    assert len(one.positions) < len(several.positions) < BUDGET.high


def test_auto_keeps_whole_passages() -> None:
    """It kept the one token with most of the attention, and so half a number."""
    kept = set(Sieve().choose(evidence(700), BUDGET, PARAMS).positions.tolist())
    assert set(range(700 - 8, 700 + 9)) <= kept
    free = [p for p in kept if 0 < p < NUM_TOKENS - 64]
    assert len(free) >= BUDGET.low


def test_auto_leaves_out_what_is_hardly_looked_at() -> None:
    """A share of all attention let many weak passages in, behind the one that says the answer."""
    budget = Budget(low=17, high=256, limit=NUM_TOKENS)
    for share, is_kept in ((0.03, True), (0.015, False)):
        found = evidence(300)
        found.layers[0].keys[0, 700, 0] = 1.0 + math.log(share) / 30.0
        kept = set(Sieve().choose(found, budget, PARAMS).positions.tolist())
        assert set(range(292, 309)) <= kept
        assert (700 in kept) == is_kept
        assert len([p for p in kept if 0 < p < NUM_TOKENS - 64]) == (34 if is_kept else 17)


def test_coverage_does_not_depend_on_the_budget() -> None:
    """A bound found at one budget was wrong at every other."""
    found, seen = evidence(*range(100, 900, 40), sharpness=8.0), set()
    for keep in (80, 128, 700):
        budget = Budget(low=keep, high=keep, limit=keep)
        seen.add(Sieve().choose(found, budget, replace(PARAMS, fallback=False)).coverage)
    assert len(seen) == 1


def test_what_a_question_sees_in_itself_is_not_the_document() -> None:
    """It was counted as covered, and its neighbours ranked by it, before what it looks at."""
    asked = (Span(0, 1, Priority.BOS), Span(1008, NUM_TOKENS, Priority.QUESTION))

    def looking_at_itself(*spots: int, sharpness: float) -> Evidence:
        found = replace(evidence(*spots, sharpness=sharpness), protected=asked)
        layer = found.layers[0]
        layer.keys[0, 1008, 1] = 1.0
        layer.queries[0, 0] = 0.0
        layer.queries[0, 0, 1] = 60.0
        return found

    spread = Sieve().choose(looking_at_itself(sharpness=0.0), BUDGET, PARAMS)
    assert spread.coverage == pytest.approx(1 / 16, abs=0.01)
    found = looking_at_itself(*range(100, 900, 8), sharpness=30.0)  # 0.01 each: below 2% of 1
    kept = set(Sieve().choose(found, BUDGET, replace(PARAMS, fallback=False)).positions.tolist())
    assert set(range(100, 900, 8)) <= kept
    found = looking_at_itself(300, sharpness=30.0)
    narrow = Budget(low=34, high=34, limit=34)
    kept = set(Sieve().choose(found, narrow, replace(PARAMS, fallback=False)).positions.tolist())
    assert kept == {0, *range(292, 309), *range(1008, NUM_TOKENS)}


def test_the_bound_decides_what_is_trusted() -> None:
    """It was one number for all models; each calibration now brings its own."""
    found = evidence(*range(100, 900, 40))
    budget = Budget(low=128, high=128, limit=NUM_TOKENS)
    reached = Sieve().choose(found, budget, replace(PARAMS, keep=128)).coverage
    assert reached is not None
    for bound, is_diffuse in ((reached - 0.01, False), (reached + 0.01, True)):
        choice = Sieve().choose(
            replace(found, coverage_bound=bound), budget, replace(PARAMS, keep=128)
        )
        assert (choice.is_diffuse, choice.coverage) == (is_diffuse, reached)


def test_a_head_that_rests_on_the_first_token_is_not_diffuse() -> None:
    """Most heads of large models do: what little they look at otherwise is what counts."""
    resting = evidence(700, sharpness=12.0)
    resting.layers[0].keys[0, 0, 0] = (
        1.04  # 12 · 1.04: 0.6 of the attention, the needle gets the rest
    )
    choice = Sieve().choose(resting, BUDGET, PARAMS)
    assert not choice.is_diffuse
    assert choice.coverage is not None
    assert choice.coverage > 0.9
    asleep = evidence(sharpness=60.0)  # nothing but the first token
    asleep.layers[0].keys[0, 0, 0] = 1.0
    assert Sieve().choose(asleep, BUDGET, PARAMS).is_diffuse


def test_a_question_that_fills_the_budget_is_called_diffuse() -> None:
    """Nothing was chosen, and with a fallback asked for the answer came from the question alone."""
    question = replace(evidence(300), protected=(Span(500, NUM_TOKENS, Priority.QUESTION),))
    budget = Budget(low=64, high=64, limit=NUM_TOKENS)
    choice = Sieve().choose(question, budget, PARAMS)
    assert (len(choice.positions), choice.coverage, choice.is_diffuse) == (NUM_TOKENS, 0.0, True)
    choice = Sieve().choose(question, budget, replace(PARAMS, keep=64, fallback=False))
    assert choice.positions.tolist() == list(range(NUM_TOKENS - 64, NUM_TOKENS))
    assert (choice.coverage, choice.is_diffuse) == (0.0, False)


def test_nothing_is_called_widened_that_was_not() -> None:
    choice = Sieve().choose(evidence(sharpness=0.0), Budget(low=256, high=256, limit=256), PARAMS)
    assert not choice.is_diffuse
    assert len(choice.positions) == 256


def test_diffuse_attention_keeps_what_fits() -> None:
    diffuse = evidence(sharpness=0.0)
    choice = Sieve().choose(diffuse, BUDGET, PARAMS)
    assert choice.is_diffuse
    assert choice.positions.tolist() == list(range(NUM_TOKENS))
    assert choice.coverage is not None
    assert choice.coverage < 0.5
    limited = Sieve().choose(diffuse, Budget(low=64, high=256, limit=600), PARAMS)
    assert limited.is_diffuse
    assert len(limited.positions) == 600
    strict = FilterParams(method="sieve", keep="auto")
    choice = Sieve().choose(diffuse, Budget(low=64, high=256, limit=256), strict)
    assert not choice.is_diffuse
    assert len(choice.positions) <= 256


@pytest.mark.parametrize("keep", [16, 70, 256, 1000])
def test_a_fixed_budget_is_exact(keep: int) -> None:
    fixed = Budget(low=keep, high=keep, limit=keep)
    choice = Sieve().choose(evidence(300), fixed, FilterParams(method="sieve", keep=keep))
    assert len(choice.positions) == keep


@pytest.mark.parametrize("selector", [Sieve(), GemFilter()])
def test_scores_that_are_not_numbers_are_an_error(selector: Any) -> None:
    """They sorted somewhere: tokens were kept for no reason, and nobody heard of it."""
    broken = evidence(300)
    broken.layers[0].keys[0, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        selector.choose(broken, Budget(low=32, high=32, limit=32), PARAMS)


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
    return Core(model=model, tokenizer=TOKENIZER, config=config, eos_ids=frozenset())


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
    assert [e.reason for e in ends] == ["length"], ends
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
    assert (plain.applied, plain.reason, plain.kept_tokens) == (True, None, 64)


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
                protected=plain_spans(600, False),
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
    assert replace(filtered.report, filter_ms=0.0) == replace(expected, filter_ms=0.0)
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
