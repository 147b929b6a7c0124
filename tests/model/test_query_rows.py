"""Queries of any rows in any layers: the same wherever chunks end, and chosen by as they should."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.observe import observe
from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.cost import filter_units
from gemserve.engine.core import Core
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.errors import CapacityExceeded
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.snapkv import SnapKV
from gemserve.kv_layout import KVLayout
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.query_tap import FilterTap, QueryTap
from gemserve.prompting.prompt import Prompt
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText

NUM_TOKENS = 150
ROWS = (0, 5, 6, 63, 64, 65, 100, 149)
LAYERS = (0, 2, 3)
SIZES = [1, 7, 64, NUM_TOKENS]
FOUND = Calibration(
    layer=2, heads=((0, 1), (1, 2), (2, 3)), ends_with=False, coverage_bound=0.0, is_measured=True
)


def ids_of(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, models.VOCAB, (count,), generator=generator).tolist()


def prefilled(model: CausalModel, ids: list[int], size: int, tap: QueryTap) -> QueryTap:
    memory = model.new_memory(2 * model.num_layers * len(ids))
    kv = memory.kv(0, num_layers=model.num_layers, capacity=len(ids))
    for start in range(0, len(ids), size):
        model.prefill_chunk(
            ids[start : start + size],
            start=start,
            kv=kv,
            rope_tokens=len(ids),
            is_last=False,
            query_tap=tap,
        )
    return tap


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_queries_are_the_same_wherever_chunks_end(name: str) -> None:
    """Rows were taken from a chunk's end alone: a question before it was lost, or another's."""
    model = CausalModel(models.build(name))
    ids = ids_of(NUM_TOKENS)
    taps = [prefilled(model, ids, size, model.new_query_tap(LAYERS, ROWS)) for size in SIZES]
    every = prefilled(model, ids, 40, model.new_query_tap(range(4), range(NUM_TOKENS)))
    for tap in taps:
        assert tap.scales.keys() == set(LAYERS)
        for layer in LAYERS:
            expected = every.of(layer)[:, list(ROWS)]
            torch.testing.assert_close(tap.of(layer), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_filter_pass_collects_what_a_full_pass_does(size: int) -> None:
    """Below the filter layer, too, and in it, where the pass ends."""
    model = CausalModel(models.build("llama"))
    ids, layer, tapped = ids_of(NUM_TOKENS), 2, (0, 2)
    memory = model.new_memory(filter_units(layer) * NUM_TOKENS)
    kv = memory.pass_kv(0, num_units=filter_units(layer), capacity=NUM_TOKENS)
    queries = model.new_query_tap(tapped, ROWS)
    for start in range(0, NUM_TOKENS, size):
        tap = FilterTap(layer=layer, queries=queries, num_tokens=NUM_TOKENS)
        model.filter_chunk(ids[start : start + size], start=start, kv=kv, tap=tap)
    full = prefilled(model, ids, NUM_TOKENS, model.new_query_tap(tapped, ROWS))
    torch.testing.assert_close(queries.queries, full.queries, atol=1e-4, rtol=1e-4)
    assert (queries.scales, queries.softcaps) == (full.scales, full.softcaps)


def test_layers_and_rows_that_nobody_watches_are_not_stored() -> None:
    model = CausalModel(models.build("llama"))
    tap = model.new_query_tap((1,), (3,))
    tap.queries.fill_(torch.nan)
    query = torch.ones(model.shape.num_heads, 3, model.shape.head_dim)
    for layer, start in ((0, 2), (1, 0), (1, 4), (2, 3)):
        tap.record(layer, query, start, 0.5, None)
        assert bool(tap.queries.isnan().all())
    tap.record(1, query, 2, 0.5, 30.0)
    assert bool((tap.of(1) == 1).all())
    assert (tap.scales, tap.softcaps) == ({1: 0.5}, {1: 30.0})


def core_of(calibration: Calibration = FOUND, **settings: Any) -> Core:
    given = {"kv_memory_bytes": 16 << 20, "filter_min_tokens": 0, "filter_layer": 2, **settings}
    model = CausalModel(models.build(given.pop("name", "llama")))
    return core_over(model, NoText(), EngineConfig(**given), frozenset(), calibration)


def request(ids: list[int], question: tuple[tuple[int, int], ...], **more: Any) -> Request:
    params = {"method": "sieve", "keep": 64, "return_selection": True, **more.pop("params", {})}
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        filter=FilterParams(**params),
        question=question,
        **more,
    )


def serve(core: Core, one: Request) -> tuple[FilterReport, Finished]:
    """Its report and end; states and memory agree in every step."""
    report = end = None
    core.add(one)
    while not core.is_idle:
        for _, event in core.step():
            if isinstance(event, Filtered):
                report = event.report
            if isinstance(event, Finished):
                end = event
        core.check_integrity()
    assert report is not None
    assert end is not None
    assert end.error is None, end.error
    assert core.kv_bytes_used == 0
    return report, end


def kept(core: Core, one: Request) -> list[int]:
    report, _ = serve(core, one)
    assert report.selection is not None
    return [p for start, stop in report.selection for p in range(start, stop)]


MIDDLE = ((300, 309), (330, 333))


def test_the_choice_is_that_of_transformers_own_attention() -> None:
    """Heads in three layers, rows in the middle: written out over eager attention."""
    ids = ids_of(500)
    hf = models.build("llama")
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        seen = hf(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    rows = [*range(300, 309), *range(330, 333)]
    assert FOUND.heads is not None
    scores = torch.stack([seen[layer][0, head, rows] for layer, head in FOUND.heads])
    flat = scores.amax(dim=(0, 1)).tolist()
    flat[0] = 0.0
    ranks = [max(flat[max(0, p - 8) : p + 9]) for p in range(500)]
    alike = [list(run) for _, run in groupby(range(500), key=lambda p: ranks[p])]
    expected: set[int] = set()
    skipped = 0
    for run in sorted(alike, key=lambda run: -ranks[run[0]]):
        if len(expected) + len(run) <= 64:
            expected.update(run)
        else:
            skipped += 1
        if len(expected) == 64 or skipped == 4:
            break
    assert kept(core_of(), request(ids, MIDDLE)) == sorted(expected)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("question", [MIDDLE, ((3, 9),), ((480, 490),), ()])
def test_a_chunked_pass_chooses_as_a_whole_one(
    size: int, question: tuple[tuple[int, int], ...]
) -> None:
    ids = ids_of(150 if size == 1 else 500)
    if size == 1 and question and question[0][0] > 140:
        question = ((100, 109),)
    whole = core_of(step_target_s=60.0, min_chunk_tokens=2048)
    cut = core_of(step_target_s=1e-9, min_chunk_tokens=size, max_chunk_tokens=size)
    assert kept(cut, request(ids, question)) == kept(whole, request(ids, question))


@pytest.mark.parametrize("ends_with", [False, True])
@pytest.mark.parametrize("size", [7, 2048])
def test_a_repeated_question_chooses_as_one_that_stands_at_the_end(
    size: int, ends_with: bool
) -> None:
    calibration = Calibration(
        layer=2, heads=FOUND.heads, ends_with=ends_with, coverage_bound=0.0, is_measured=True
    )
    core = core_of(calibration, min_chunk_tokens=size, max_chunk_tokens=size)
    ids = ids_of(600)
    asked = [*ids[4:24], *ids[30:34]]
    first = request(ids, ((4, 24), (30, 34)))
    assert core.planner.plan(first).repeated == tuple(asked)
    end = ProtectedRange(600, 624, Priority.QUESTION)
    last = request(ids + asked, ((600, 624),), protected=(end,))
    assert core.planner.plan(last).repeated == ()
    assert 64 - Sieve().passage_limit(64) < len(kept(core, first)) <= 64
    assert kept(core, last) == [*kept(core, first), *range(600, 624)]
    plain = core.planner.plan(request(ids, ()))
    assert (plain.repeated, plain.rows) == ((), tuple(range(584, 600)))


def test_memory_holds_the_repeated_question_while_it_is_read() -> None:
    """It wrote behind the request's own memory, into a neighbour's keys."""
    ids, asked = ids_of(600), ((4, 24),)
    unit = CausalModel(models.build("llama")).shape.unit_bytes
    needed = (2 * 2 + 1) * (600 + 20)
    exact = core_of(kv_memory_bytes=needed * unit)
    _, end = serve(exact, request(ids, asked))
    assert end.peak_kv_bytes == needed * unit
    small = core_of(kv_memory_bytes=(needed - 1) * unit)
    with pytest.raises(CapacityExceeded):
        small.add(request(ids, asked))
    _, end = serve(small, request(ids, ()))
    assert end.peak_kv_bytes == 5 * 600 * unit


def test_neighbours_read_on_undisturbed() -> None:
    """Several at once, in small steps, with moves between: each as it is alone."""
    asked = [request(ids_of(400 + 9 * i, i), ((4, 24),) if i % 2 else MIDDLE) for i in range(5)]
    expected = [kept(core_of(), one) for one in asked]
    core = core_of(kv_memory_bytes=1 << 20, step_target_s=1e-9, min_chunk_tokens=64)
    jobs = [core.add(one) for one in asked]
    found: dict[Any, list[int]] = {}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Filtered):
                assert event.report.selection is not None
                ranges = event.report.selection
                found[job] = [p for start, stop in ranges for p in range(start, stop)]
        core.check_integrity()
    assert [found[job] for job in jobs] == expected
    assert not core._runner._states


def test_what_is_read_is_the_prompt_and_then_the_question() -> None:
    plan = FilterPlan(
        reason=None, num_kept=4, budget=Budget(low=4, high=4, limit=4), layer=1, repeated=(7, 8, 9)
    )
    planned = replace(request(list(range(20, 31)), ()), plan=plan)
    one = LiveSequence(request=planned, order=0)
    everything = [*range(20, 31), 7, 8, 9]
    assert one.num_read == len(everything)
    assert one.reading_units(KVLayout(growing=4)) == 3 * len(everything)
    for start in range(len(everything)):
        for count in range(1, len(everything) - start + 1):
            assert list(planned.read_ids(start, count)) == everything[start : start + count]


def test_an_observation_is_what_the_engine_sees() -> None:
    """One reading of all layers, chunked in its own way, and begun where prompts differ."""
    core = core_of()
    ids = ids_of(700)
    prompts = [Prompt(ids=ids[:cut] + ids_of(700 - cut, 9), protected=()) for cut in (700, 650, 0)]
    rows = [[*range(300, 309), 699], [640, 660], [699]]
    for prompt, wanted, evidence in zip(prompts, rows, observe(core, prompts, rows), strict=True):
        model = core.model
        tap = prefilled(model, list(prompt.ids), 64, model.new_query_tap(range(4), wanted))
        assert list(evidence.rows) == wanted
        for layer in range(4):
            seen = evidence.layers[layer]
            torch.testing.assert_close(seen.queries, tap.of(layer), atol=1e-4, rtol=1e-4)
            assert seen.scale == tap.scales[layer]


def test_snapkv_watches_its_rows_in_every_layer() -> None:
    model = CausalModel(models.build("llama"))
    ids = ids_of(NUM_TOKENS)
    rows = SnapKV().rows(NUM_TOKENS)
    assert list(rows) == list(range(NUM_TOKENS - 32, NUM_TOKENS))
    assert list(SnapKV().rows(10)) == list(range(10))
    tap = prefilled(model, ids, 50, model.new_query_tap(range(4), rows))
    whole = prefilled(model, ids, NUM_TOKENS, model.new_query_tap(range(4), range(NUM_TOKENS)))
    torch.testing.assert_close(tap.queries, whole.queries[:, :, -32:], atol=1e-4, rtol=1e-4)
