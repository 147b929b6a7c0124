"""The best passages are read again, each alone and by all layers, before any of them is kept."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.store import AdapterStore
from gemserve.engine.core import Core
from gemserve.engine.scheduling.pace import Crowd
from gemserve.filter_plan import Budget
from gemserve.filtering.second_look import LONGEST, LOOKED_AT
from gemserve.filtering.selector import Choice, Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.model.adapter import NO_ADAPTER
from gemserve.model.base_model import base_of
from gemserve.model.causal_model import CausalModel
from gemserve.types import (
    Filtered,
    FilterParams,
    FilterReport,
    Finished,
    QuestionFrame,
    Request,
    SamplingParams,
    TextBreaks,
    TextDelta,
)
from gemserve_kernels import select_backend
from tests import adapters, models
from tests.cache_world import RandomPace
from tests.model.test_query_rows import FOUND, core_of, ids_of, request, serve

N = 3000
QUESTION = ((N - 12, N - 2),)
FRAME = QuestionFrame(before=(1, 9), after=(8, 7, 6))
BREAKS = TextBreaks(paragraphs=tuple(range(0, N, 40)))
LOOKS = replace(FOUND, auto_keep=128, second_look=True)


def looking(seed: int = 1, **more: Any) -> Request:
    """A request that looks twice; by its own calibration it keeps at most 128 tokens."""
    params = {"keep": "auto", "return_scores": "exact", **more.pop("params", {})}
    given = {"breaks": BREAKS, "question_frame": FRAME, **more}
    return request(ids_of(N, seed), QUESTION, params=params, **given)


def core_that_looks(**settings: Any) -> Core:
    return core_of(LOOKS, **settings)


def likelihoods(report: FilterReport) -> tuple[float, ...]:
    assert report.scores is not None
    assert report.scores.inputs is not None
    return report.scores.inputs.likelihoods


NAMES = ["llama", "mistral-window", "qwen2", "phi3-longrope", "llama-dynamic", "opt"]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("name", NAMES)
def test_a_likelihood_is_that_of_the_models_own_logits(name: str, count: int) -> None:
    """A row too early or too late is the likelihood of other tokens."""
    ids = ids_of(230)  # beyond where rotations change
    found = CausalModel(models.build(name)).mean_logprob(ids, count)
    hf = models.build(name)
    hf.config._attn_implementation = "eager"
    with torch.no_grad():
        logprobs = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    expected = [float(logprobs[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids))]
    assert found == pytest.approx(sum(expected) / count, rel=1e-3)


def test_a_likelihood_behind_a_prefix_is_that_of_peft(tmp_path: Path) -> None:
    peft = adapters.write_peft(tmp_path / "p", models.build("llama"), "prefix")
    ids, count = ids_of(90), 12
    with torch.no_grad():
        logprobs = peft(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    rows = logprobs[-len(ids) :]
    expected = [float(rows[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids))]
    model = CausalModel(models.build("llama"))
    store = AdapterStore(model, tmp_path, 1 << 20)
    store.load("p", "p")
    adapter: Any = store.get("p")
    found = model.mean_logprob(ids, count, adapter=adapter)
    assert found == pytest.approx(sum(expected) / count, rel=1e-3)
    assert found != pytest.approx(model.mean_logprob(ids, count), rel=1e-2)


@pytest.mark.parametrize("window", ["off", 512])
def test_what_is_reported_was_read(window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_that_looks()
    seen: list[tuple[list[int], int, float]] = []
    own = CausalModel.mean_logprob

    def spy(self: CausalModel, ids: list[int], count: int, **more: Any) -> float:
        assert more["adapter"] is NO_ADAPTER
        seen.append((ids, count, own(self, ids, count, **more)))
        return seen[-1][-1]

    one = looking(params={"window": window})
    monkeypatch.setattr(CausalModel, "mean_logprob", spy)
    report, _ = serve(core, one)
    assert report.looked_at == len(seen) == LOOKED_AT
    assert likelihoods(report) == tuple(math.exp(logprob) for _, _, logprob in seen)
    assert min(likelihoods(report)) > 0
    assert report.kept_tokens <= 128
    assert report.applied
    assert (report.window is None) == (window == "off")
    text = list(one.prompt_ids)
    asked = text[slice(*QUESTION[0])]
    starts = set()
    for ids, count, _ in seen:
        assert count == len(asked)
        assert (ids[:2], ids[-13:-10], ids[-10:]) == ([1, 9], [8, 7, 6], asked)
        passage = ids[2:-13]
        assert 0 < len(passage) <= LONGEST
        starts.add(next(s for s in BREAKS.paragraphs if text[s : s + len(passage)] == passage))
    assert len(starts) == LOOKED_AT, "each passage once"
    assert report.selection is not None
    kept = {i for start, stop in report.selection for i in range(start, stop)}
    assert kept & starts, "what is looked at is what is kept of"


@pytest.mark.parametrize("window", ["off", 512])
def test_a_second_look_is_the_same_cold_and_cached(window: Any) -> None:
    cold = core_that_looks(cache_memory=0.0)
    warm = core_that_looks()
    one = looking(params={"window": window})
    expected, _ = serve(cold, one)
    assert expected.looked_at == LOOKED_AT
    for is_cached in (False, True):
        report, _ = serve(warm, one)
        assert (report.cached_tokens > 2000) == is_cached
        assert report.selection == expected.selection
        assert likelihoods(report) == pytest.approx(likelihoods(expected), rel=1e-4)
        assert report.looked_at == LOOKED_AT


def test_pauses_change_no_second_look() -> None:
    """Another slice's keys and values would be another passage's."""
    expected, _ = serve(core_that_looks(), looking())
    core = core_that_looks()
    paused(core)
    report, _ = serve(core, looking())
    assert report.selection == expected.selection
    assert likelihoods(report) == pytest.approx(likelihoods(expected), rel=1e-4)


def test_the_best_of_a_second_look_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight passages the one behind which the question is likely is kept, however it ranked."""
    plain, _ = serve(core_that_looks(), looking(params={"second_look": "off"}))
    assert (plain.looked_at, likelihoods(plain)) == (0, ())
    read: list[list[int]] = []

    def second(self: CausalModel, ids: list[int], count: int, **_: Any) -> float:
        read.append(ids[2:-13])
        return -1.0 if len(read) == 2 else -5.0 - len(read)

    monkeypatch.setattr(CausalModel, "mean_logprob", second)
    one = looking()
    report, _ = serve(core_that_looks(), one)
    assert report.selection is not None
    # half of the budget is enough: the first two
    assert 64 <= report.kept_tokens - report.protected_tokens <= 128
    ids = list(one.prompt_ids)
    for passage in read[:2]:
        start = next(s for s in BREAKS.paragraphs if ids[s : s + len(passage)] == passage)
        assert any(a <= start and start + len(passage) <= b for a, b in report.selection)


def test_an_adapters_second_look_is_its_own(tmp_path: Path) -> None:
    core = core_that_looks()
    adapters.write(tmp_path, "ntk", core.model, 0)
    adapter = load_adapter("style", tmp_path, core.model, base_of(core.model), 1 << 24)
    plain, _ = serve(core, looking())
    adapted, _ = serve(core, looking(adapter=adapter))
    assert adapted.looked_at == plain.looked_at == LOOKED_AT
    assert likelihoods(adapted) != likelihoods(plain)


def test_layers_on_the_host_are_not_copied_in_for_passages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_that_looks()
    monkeypatch.setattr(CausalModel, "num_host_layers", 1)
    report, _ = serve(core, looking())
    assert (report.looked_at, likelihoods(report)) == (0, ())
    assert report.applied


class InTurns(RandomPace):
    """Every pass pauses at every chance, and between two pieces the streams get a token."""

    def __init__(self, core: Core) -> None:
        super().__init__(None, core.model.shape.layer(0, 1))
        self._is_due = False

    def is_decode_due(self, crowd: Crowd) -> bool:
        self._is_due = not self._is_due
        return self._is_due

    def slice_s(self, crowd: Crowd) -> float:
        return 0.0


def paused(core: Core) -> None:
    pace: Any = InTurns(core)
    core._pace = pace


def is_looking(core: Core) -> bool:
    states = getattr(core._runner, "_states", {})
    passes = [state.chunk_pass for state in states.values()]
    return any(under_way is not None and under_way.look is not None for under_way in passes)


def streaming(name: str = "stream") -> Request:
    return replace(
        request(ids_of(50, 7), ()),
        request_id=name,
        sampling=SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True),
        filter=FilterParams(method="none", keep=16),
    )


def test_other_streams_advance_during_a_second_look() -> None:
    core = core_that_looks()
    paused(core)
    core.add(streaming())
    core.add(looking())
    steps, drawn = 0, Counter[str]()
    for _ in range(5000):
        was_looking = is_looking(core)
        events = core.step()
        steps += was_looking
        if was_looking:
            drawn.update(job.request.request_id for job, e in events if isinstance(e, TextDelta))
        core.check_integrity()
        if any(isinstance(event, Filtered) and event.report.looked_at for _, event in events):
            break
    else:
        pytest.fail("the request did not look twice")
    assert steps > 2 * LOOKED_AT, "a passage in several slices"
    assert drawn["stream"] > LOOKED_AT


def test_a_cancelled_second_look_gives_its_memory_back() -> None:
    core = core_that_looks()
    paused(core)
    expected, _ = serve(core_that_looks(), looking())
    job = core.add(looking())
    for _ in range(5000):
        if is_looking(core):
            break
        core.step()
    for _ in range(5):  # in the middle of a passage
        core.step()
    assert is_looking(core)
    core.cancel(job)
    core.check_integrity()
    assert core.kv_bytes_used == 0
    assert not is_looking(core)
    report, _ = serve(core, looking())
    assert report.selection == expected.selection


def failing(*_: Any, **__: Any) -> float:
    raise RuntimeError("out of memory")


def ends_of(core: Core, *requests: Request) -> dict[str, tuple[Finished, FilterReport]]:
    """How each request ended, by its name, if all run at once."""
    ends: dict[str, Finished] = {}
    reports: dict[str, FilterReport] = {}
    for one in requests:
        core.add(one)
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Finished):
                ends[job.request.request_id] = event
            if isinstance(event, Filtered):
                reports[job.request.request_id] = event.report
        core.check_integrity()
    assert core.kv_bytes_used == 0
    return {name: (end, reports.get(name, NO_REPORT)) for name, end in ends.items()}


NO_REPORT: Any = None


@pytest.mark.parametrize("window", ["off", 512])
def test_a_second_look_that_fails_ends_that_request_alone(
    window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_that_looks()
    monkeypatch.setattr(CausalModel, "mean_logprob", failing)
    short = replace(streaming(), sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    ends = ends_of(core, short, looking(params={"window": window}))
    assert ends["stream"][0].reason == "length"
    failed, report = ends["r"]
    assert (failed.reason, report) == ("error", None)
    assert "out of memory" in (failed.error or "")


@pytest.mark.parametrize("window", ["off", 512])
def test_a_second_look_that_fails_open_reads_everything(
    window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_that_looks(filter_on_error="full")
    monkeypatch.setattr(CausalModel, "mean_logprob", failing)
    end, report = ends_of(core, looking(params={"window": window}))["r"]
    assert end.reason == "length"
    assert (report.applied, report.reason, report.kept_tokens) == (False, "error", N)
    assert report.looked_at == 0
    monkeypatch.undo()
    assert serve(core, looking())[0].looked_at == LOOKED_AT


def choose(num_tokens: int, bound: float = 0.0, **more: Any) -> Choice:
    """Sieve's choice of 128 tokens at most, over scores that fall from the beginning on."""
    keys = torch.linspace(1, 0.1, num_tokens)[None, :, None]
    layer = LayerEvidence(queries=torch.zeros(1, 1, 1), keys=keys, scale=1.0, softcap=None)
    evidence = Evidence(
        num_tokens=num_tokens,
        layers={0: layer},
        rows=[num_tokens - 1],
        backend=select_backend(torch.device("cpu")),
        protected=(),
        breaks=TextBreaks(paragraphs=tuple(range(0, num_tokens, 40))),
        coverage_bound=bound,
        looks_twice=True,
        **more,
    )
    budget = Budget(low=64, high=128, limit=num_tokens if bound else 128)
    params = FilterParams(method="sieve", keep="auto", fallback=bool(bound))
    return GivenScores().choose(evidence, budget, params)


class GivenScores(Sieve):
    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        return evidence.filter_layer.keys[0, :, 0].clone()


def test_no_more_passages_are_looked_at_than_there_are() -> None:
    assert choose(200).look_at == tuple((start, start + 40) for start in range(0, 200, 40))
    assert len(choose(600).look_at) == LOOKED_AT
    assert choose(600).positions.numel() == 0, "nothing is chosen yet"


def test_a_single_passage_is_not_looked_at() -> None:
    choice = choose(40)
    assert choice.look_at == ()
    assert choice.positions.tolist() == list(range(40))


def test_what_is_not_trusted_is_not_looked_at() -> None:
    """All of it is read anyway."""
    choice = choose(600, bound=1.0)
    assert (choice.look_at, choice.is_diffuse) == ((), True)
    assert len(choice.positions) == 600


def test_half_of_the_budget_is_enough_after_a_second_look() -> None:
    """What ranks behind the first passages only distracts, whatever attention it got."""
    looked = (0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1)
    choice = choose(600, likelihoods=looked)
    kept = np.unique(choice.positions.numpy() // 40).tolist()
    assert kept == [0, 2]
    assert len(choice.positions) == 80
