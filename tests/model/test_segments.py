"""Documents that are read in segments: scores as of separate passes, and found again anywhere."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions, FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import ConfigError, RequestError
from gemserve.filtering.segment_scores import MOST_KEPT
from gemserve.filtering.sieve import Sieve
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import LoadedModel
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.query_tap import FilterTap
from tests import adapters, models
from tests.architectures import families
from tests.cores import core_over
from tests.model.test_selection import NoText

LAYER, SIZE, ANCHOR = 2, 256, (1, 9, 8)
UNIT = 2 * 16 * 4  # bytes of one token's keys in one layer of the tiny models
NAMES = ["llama", "mistral", "qwen2", "qwen2-window", "qwen3", "phi3-longrope"]


def core_of(name: str = "llama", *, tokens: int = 40_000, cache_memory: float = 0.5) -> Core:
    return core_over(
        CausalModel(models.build(name)),
        NoText(),
        EngineConfig(
            filter_layer=LAYER,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_memory=cache_memory,
            max_prompt_tokens=100_000,
        ),
        frozenset(),
    )


def ids_of(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, models.VOCAB) for _ in range(count)]


def request(
    ids: list[int],
    *,
    system: int = 0,
    window: int = SIZE,
    adapter: LoadedAdapter | None = None,
    tenant: bytes = b"",
) -> Request:
    question = len(ids) - 6, len(ids)
    protected = [ProtectedRange(*question, Priority.QUESTION)]
    if system:
        protected.append(ProtectedRange(0, system, Priority.SYSTEM))
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
        filter=FilterParams(
            method="sieve", keep=64, window=window, return_selection=True, return_scores="exact"
        ),
        protected=tuple(protected),
        question=(question,),
        anchor=ANCHOR,
        adapter=adapter,
        tenant=tenant,
    )


def report_of(events: list[Event]) -> FilterReport:
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    return report


def answer(core: Core, asked: Request) -> tuple[FilterReport, tuple[int, ...]]:
    events = list(core.run_alone(asked))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length", last.error
    core.check_integrity()
    drawn = tuple(t for e in events if isinstance(e, TextDelta) for t in e.token_ids)
    return report_of(events), drawn


@pytest.mark.parametrize("reads_together", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_separate_passes(
    name: str, reads_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each segment alone, in one pass, with the question behind it; as a CPU and a GPU read."""
    monkeypatch.setattr(CausalModel, "reads_together", reads_together)
    core, ids = core_of(name), ids_of(1, 900)
    planned = core.planner.planned(request(ids))
    assert planned.plan is not None
    plan = planned.plan.segments
    assert plan is not None
    assert len(plan.segments) > 3
    model, logits, sinks = core.model, torch.full((4, 6, len(ids)), -torch.inf), []
    for segment in plan.segments:
        text = [*ANCHOR, *ids[segment.start : segment.stop]]
        whole = [*text, *ids[-6:]]
        memory = model.new_memory(len(whole) * (2 * LAYER + 1))
        kv = memory.pass_kv(0, num_units=2 * LAYER + 1, capacity=len(whole))
        tap = model.new_query_tap([LAYER], range(len(text), len(whole)))
        tokens = len(whole)
        model.filter_chunk(
            whole, start=0, kv=kv, tap=FilterTap(layer=LAYER, queries=tap, num_tokens=tokens)
        )
        keys = kv.keys(LAYER, len(text)).repeat_interleave(2, 0)
        seen = tap.of(LAYER) @ keys.transpose(1, 2) * tap.scales[LAYER]
        sinks.append(seen[:, :, : len(ANCHOR)].logsumexp(-1))
        logits[:, :, segment.start : segment.stop] = seen[:, :, len(ANCHOR) :]
    sink = torch.stack(sinks).mean(0)
    total = torch.logaddexp(logits.logsumexp(-1), sink)
    for segment in plan.segments:  # the best of each row alone are remembered
        part = logits[:, :, segment.start : segment.stop]
        part[part < part.topk(MOST_KEPT, dim=-1).values[:, :, -1:]] = -torch.inf
    expected = (logits - total[:, :, None]).exp().amax(dim=(0, 1))
    report, _ = answer(core, planned)
    assert report.scores is not None
    assert report.scores.inputs is not None
    found = np.frombuffer(b64decode(report.scores.tokens), dtype="<f4")
    if name != "phi3-longrope":  # whose rotation depends on the longest segment of a group
        torch.testing.assert_close(torch.tensor(found), expected, rtol=2e-3, atol=1e-6)
    assert (report.window, report.windows, report.cached_windows) == (
        SIZE,
        len(plan.segments),
        0,
    )


def test_every_part_is_found_wherever_it_stands() -> None:
    """Another system prompt, a line in front, files in another order: what stayed is cached."""
    one, two, question = ids_of(1, 2000), ids_of(2, 2000), ids_of(3, 6)
    system, other = ids_of(4, 100), ids_of(5, 130)
    core = core_of(tokens=400_000)
    first, _ = answer(core, request([*system, *one, *two, *question], system=100))
    assert (first.cached_tokens, first.cached_windows) == (0, 0)
    read = {}
    for name, ids, count in (
        ("same", [*system, *one, *two, *question], 100),
        ("another system prompt", [*other, *one, *two, *question], 130),
        ("a line in front", [*system, *ids_of(6, 20), *one, *two, *question], 100),
        ("a line less", [*system, *one[:900], *one[930:], *two, *question], 100),
        ("another order", [*system, *two, *one, *question], 100),
        ("longer", [*system, *one, *two, *ids_of(7, 300), *question], 100),
    ):
        cold = answer(core_of(tokens=400_000, cache_memory=0.0), request(ids, system=count))
        report, drawn = answer(core, request(ids, system=count))
        assert (report.selection, drawn) == (cold[0].selection, cold[1]), name
        assert report.scores is not None
        assert cold[0].scores is not None
        assert report.scores.tokens == cold[0].scores.tokens, f"{name}: by what was cached"
        assert report.windows is not None
        assert report.cached_windows is not None
        read[name] = report.windows - report.cached_windows
    assert read["same"] == read["another system prompt"] == 0
    assert max(read["a line in front"], read["a line less"]) <= 2
    assert read["another order"] <= 6
    assert read["longer"] <= 4


def test_the_pace_counts_what_is_asked_behind_cached_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside many cached segments it took reading for up to ten times as slow as it is."""
    core, costs = core_of(tokens=400_000), list[float]()
    monkeypatch.setattr(core._pace, "observe_pass", lambda seconds, cost: costs.append(cost))
    document, question = ids_of(1, 3000), ids_of(2, 6)
    totals = []
    for ids in (document, [*document, *ids_of(3, 200)]):
        costs.clear()
        report, _ = answer(core, request([*ids, *question]))
        assert report.windows is not None
        assert report.cached_windows is not None
        plan = core.planner.plan(request([*ids, *question]))
        assert plan.segments is not None
        assert len(plan.segments.groups) == 1
        asked, shape = len(plan.segments.asked), core.model.shape
        sizes = [len(ANCHOR) + segment.num_tokens for segment in plan.segments.segments]
        fresh = costs[0] - sum(shape.filter_chunk(size, asked, LAYER) for size in sizes)
        totals.append((report.windows - report.cached_windows, sizes, fresh))
    (num_all, sizes, fresh), (num_new, longer, rest) = totals
    assert fresh == pytest.approx(sum(core.model.shape.filter_chunk(0, s, LAYER) for s in sizes))
    new = [size for size in longer if size not in sizes]
    assert 0 < num_new < num_all / 4
    assert rest == pytest.approx(sum(core.model.shape.filter_chunk(0, s, LAYER) for s in new))
    costs.clear()
    answer(core, request([*document, *ids_of(4, 6)]))
    assert costs[0] == 0, "nothing is learnt where nothing is read but what is asked"


def test_one_tenants_segments_are_not_anothers() -> None:
    core, ids = core_of(tokens=100_000), ids_of(1, 2000)
    answer(core, request(ids, tenant=b"one"))
    assert answer(core, request(ids, tenant=b"two"))[0].cached_windows == 0
    assert answer(core, request(ids, tenant=b"one"))[0].cached_windows


@pytest.mark.parametrize("reads_together", [False, True])
def test_an_adapters_segments_are_its_own(
    tmp_path: Path, reads_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalModel, "reads_together", reads_together)
    core, ids = core_of(tokens=100_000), ids_of(1, 2000)
    adapters.write(tmp_path, "ntk", core.model, 0)
    adapter = load_adapter("style", tmp_path, core.model, base_of(core.model), 1 << 24)
    answer(core, request(ids))
    first, _ = answer(core, request(ids, adapter=adapter))
    again, _ = answer(core, request(ids, adapter=adapter))
    assert first.cached_windows == 0
    assert again.cached_windows == again.windows


def test_a_prompt_beyond_the_context_is_read_in_little_memory() -> None:
    """30,000 tokens on a model with a context of 8,192; one pass would hold 150,000 units."""
    core = core_of(tokens=60_000, cache_memory=0.0)
    assert core.model.context_tokens == 8192
    report, _ = answer(core, request(ids_of(1, 30_000), window=512))
    assert 64 + 6 - Sieve().passage_limit(64) < report.kept_tokens <= 64 + 6
    assert report.windows is not None
    assert report.windows > 58


def test_a_document_larger_than_the_cache_keeps_what_fits() -> None:
    core, ids = core_of(tokens=60_000, cache_memory=0.5), ids_of(1, 12_000)
    answer(core, request(ids))
    again, _ = answer(core, request(ids))
    assert again.cached_windows
    assert again.windows is not None
    assert again.cached_windows < again.windows


def test_below_a_segments_size_a_prompt_is_read_in_one_pass() -> None:
    core, ids = core_of(), ids_of(1, 250)
    assert report_of(list(core.run_alone(request(ids)))).window is None
    off = replace(
        request(ids_of(1, 900)), filter=FilterParams(method="sieve", keep=64, window="off")
    )
    assert report_of(list(core.run_alone(off))).window is None


@pytest.mark.parametrize("method", ["gemfilter", "snapkv", "none", "position"])
def test_other_methods_have_no_segments(method: str) -> None:
    with pytest.raises(RequestError, match=r"filter\.window=512: only method sieve has it"):
        core_of().planner.resolve(FilterOptions(method=method, window=512))


def test_a_cancelled_pass_gives_its_memory_back() -> None:
    core, ids = core_of(tokens=100_000), ids_of(1, 6000)
    answer(core, request(ids[:3000] + ids[-6:]))
    job = core.add(request(ids))
    for _ in range(3):
        core.step()
    core.cancel(job)
    core.check_integrity()
    assert core.kv_bytes_used == 0


def test_questions_at_once_read_their_document_once() -> None:
    core, document = core_of(tokens=200_000), ids_of(1, 4000)
    jobs = [core.add(request([*document, *ids_of(seed, 6)])) for seed in range(2, 6)]
    reports: list[FilterReport] = []
    for _ in range(10_000):
        reports += [e.report for _, e in core.step() if isinstance(e, Filtered)]
        if core.is_idle:
            break
    assert len(reports) == len(jobs)
    found = sorted(report.cached_windows or 0 for report in reports)
    assert found[0] == 0
    assert found[1] > 0.8 * (reports[0].windows or 0)


def test_a_model_of_sliding_windows_filters_long_prompts_in_segments() -> None:
    """It had to be started with --max-prompt-tokens, which then refused the long prompts."""
    sizes = {"max_position_embeddings": 9000, "vocab_size": models.VOCAB}
    hf = families.build("mistral", sliding_window=700, **sizes)
    loaded = LoadedModel(
        model=CausalModel(hf), tokenizer=NoText(), eos_ids=frozenset(), source="/", name="tiny"
    )
    config = EngineConfig(
        filter_layer=LAYER,
        filter_min_tokens=0,
        filter_window=SIZE,
        kv_memory_bytes=40_000 * UNIT,
        calibrate="off",
    )
    core = assemble(loaded, config)
    assert core.config.max_pass_tokens == 700
    report, _ = answer(core, request(ids_of(7, 5000)))
    assert report.applied
    assert report.windows is not None
    assert report.windows > 15
    too_wide = replace(config, filter_window=600)
    with pytest.raises(ConfigError, match="sees only the last 700 tokens"):
        assemble(loaded, too_wide)
