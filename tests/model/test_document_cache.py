"""A prompt that goes on from a cached document is answered as by a server that has no cache."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gemserve.calibration.files import Calibration
from gemserve.config import EngineConfig
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import Memory
from tests import adapters, models
from tests.cores import core_over
from tests.model.test_selection import NoText

UNIT = 2 * 16 * 4  # bytes of one token's keys in one layer of the tiny models
NAMES = ["llama", "mistral", "qwen3", "phi3-longrope"]
Answer = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]


def core_of(name: str, *, tokens: int, cache_memory: float) -> Core:
    return core_over(
        CausalModel(models.build(name)),
        NoText(),
        EngineConfig(
            filter_layer=2,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_memory=cache_memory,
            min_chunk_tokens=64,
            max_chunk_tokens=200,
        ),
        frozenset(),
    )


def request(
    ids: list[int], question: int = 6, adapter: LoadedAdapter | None = None, tenant: bytes = b""
) -> Request:
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
        filter=FilterParams(method="sieve", keep=48, return_selection=True),
        question=((len(ids) - question, len(ids)),),
        adapter=adapter,
        tenant=tenant,
    )


def answer_of(events: list[Event]) -> Answer:
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    assert report.selection is not None
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length", events[-1]
    tokens = [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]
    return report.selection, tuple(tokens)


def cached_tokens(events: list[Event]) -> int:
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    return report.cached_tokens


def random_ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, models.VOCAB) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_question_selects_anew(name: str) -> None:
    rng = Random(1)
    document = random_ids(rng, 700)
    prompts = [document + random_ids(rng, 20) for _ in range(3)]
    warm = core_of(name, tokens=40_000, cache_memory=0.5)
    cold = core_of(name, tokens=40_000, cache_memory=0.0)
    for index, ids in enumerate(prompts):
        events = list(warm.run_alone(request(ids)))
        assert answer_of(events) == answer_of(list(cold.run_alone(request(ids))))
        # length-dependent rotary embeddings give every prompt keys of its own
        is_found = index > 0 and name != "phi3-longrope"
        assert cached_tokens(events) == (700 if is_found else 0)
    assert cold.cache_usage_ratio == 0.0
    warm.check_integrity()


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_every_turn_of_a_conversation_goes_on_from_several_places(name: str) -> None:
    """Attention joins parts in any order; the keys a filter looks at, and a window's, need theirs.

    A window that begins behind what is shared read the pass's own tokens from the wrong one on.
    """
    rng = Random(10)
    turns: list[int] = []
    warm, cold = (core_of(name, tokens=60_000, cache_memory=share) for share in (0.5, 0.0))
    for num_places in range(1, 5):
        length = len(turns)
        turns += random_ids(rng, 450)
        for cached in (length, len(turns)):
            asked = request(turns + random_ids(rng, 40))
            events = list(warm.run_alone(asked))
            assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
            assert cached_tokens(events) == cached
        (document,) = warm._scheduler.cache.documents
        assert len(document.shares) == num_places
    asked = request(turns[:451] + random_ids(rng, 40))  # one token of the second place
    events = list(warm.run_alone(asked))
    assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
    assert cached_tokens(events) == 451


def test_what_is_in_too_many_places_is_copied_in_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every place was copied over the first one."""
    monkeypatch.setattr("gemserve.engine.reuse.lookup.MOST_SHARES", 1)
    rng, turns = Random(12), list[int]()
    warm, cold = (core_of("llama", tokens=60_000, cache_memory=share) for share in (0.5, 0.0))
    for num_places in (1, 2, 1):
        turns += random_ids(rng, 450)
        asked = request(turns + random_ids(rng, 40))
        assert answer_of(list(warm.run_alone(asked))) == answer_of(list(cold.run_alone(asked)))
        (document,) = warm._scheduler.cache.documents
        assert len(document.shares) == num_places


def test_the_same_prompt_again_is_read_from_its_question_on() -> None:
    core = core_of("llama", tokens=40_000, cache_memory=0.5)
    ids = random_ids(Random(2), 600)
    first, second = (list(core.run_alone(request(ids))) for _ in range(2))
    assert answer_of(first) == answer_of(second)
    assert cached_tokens(second) >= 580


@pytest.mark.parametrize("seed", range(8))
def test_interleaved_requests_are_answered_as_alone(seed: int) -> None:
    """Evictions, compaction, cancellations, adapters of one name, and two tenants."""
    rng = Random(seed)
    warm = core_of("llama", tokens=rng.choice((9_000, 14_000, 40_000)), cache_memory=0.6)
    cold = core_of("llama", tokens=40_000, cache_memory=0.0)
    versions: list[Any] = [None] + [made(warm.model, seed) for seed in (1, 2)]
    documents = [random_ids(rng, rng.randrange(300, 700)) for _ in range(3)]
    requests = [
        request(
            rng.choice(documents) + random_ids(rng, rng.choice((10, 30, 300))),
            adapter=rng.choice(versions),
            tenant=rng.choice((b"a", b"b")),
        )
        for _ in range(14)
    ]
    events: dict[Job, list[Event]] = {}
    pending = list(requests)
    cancelled = []
    while pending or not warm.is_idle:
        while pending and rng.random() < 0.3:
            events[warm.add(pending.pop(0))] = []
        for job, event in warm.step():
            events[job].append(event)
        warm.check_integrity()
        if rng.random() < 0.01 and events:
            job = rng.choice(list(events))
            cancelled += [job for job, _ in warm.cancel(job)]
    for job, seen in events.items():
        if job not in cancelled:
            assert answer_of(seen) == answer_of(list(cold.run_alone(job.request)))
    assert warm.kv_bytes_used == 0


def made(model: CausalModel, seed: int) -> LoadedAdapter:
    """An NTK adapter; both have one name, and versions of their own."""
    from gemserve.adapters.ntk import build

    tensors, settings = adapters.tensors("ntk", model, seed)
    return build("style", str(seed), tensors, settings, model)


def test_a_failed_filter_pass_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of("llama", tokens=40_000, cache_memory=0.5)
    ids = random_ids(Random(3), 600)

    def fail(*_: object) -> None:
        raise RuntimeError("no choice")

    with monkeypatch.context() as patch:
        patch.setattr("gemserve.engine.running.runner.choose_positions", fail)
        events = list(core.run_alone(request(ids)))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "error"
    assert core.cache_usage_ratio == 0.0


def test_a_filter_pass_that_fails_open_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts were read whole for hours, and no metric told of it."""
    config = EngineConfig(
        filter_layer=2, filter_min_tokens=0, kv_memory_bytes=1 << 24, filter_on_error="full"
    )
    core = core_over(CausalModel(models.build("llama")), NoText(), config, frozenset())
    monkeypatch.setattr("gemserve.engine.running.runner.choose_positions", None)
    events = list(core.run_alone(request(random_ids(Random(3), 300))))
    assert len(answer_of(events)[1]) == 5
    assert core.internal_errors["filter_pass"] == 1


def test_another_filter_layer_is_another_document() -> None:
    core = core_of("llama", tokens=40_000, cache_memory=0.5)
    ids = random_ids(Random(4), 600)
    list(core.run_alone(request(ids)))
    other = request(ids)
    other = replace(other, filter=replace(other.filter, layer=1))
    assert cached_tokens(list(core.run_alone(other))) == 0


def test_heads_of_several_layers_are_watched_over_cached_keys() -> None:
    heads = ((1, 0), (2, 3))
    calibration = Calibration(layer=2, heads=heads, source="test")
    rng = Random(5)
    document = random_ids(rng, 500)
    prompts = [document + random_ids(rng, 12) for _ in range(2)]
    answers = []
    for share in (0.5, 0.0):
        core = core_over(
            CausalModel(models.build("llama")),
            NoText(),
            EngineConfig(filter_min_tokens=0, kv_memory_bytes=40_000 * UNIT, cache_memory=share),
            frozenset(),
            calibration,
        )
        answers.append([answer_of(list(core.run_alone(request(ids)))) for ids in prompts])
    assert answers[0] == answers[1]


def test_other_heads_choose_over_the_same_cached_keys() -> None:
    """Keys and values do not depend on who looks at them: a request's heads need no new pass."""
    ids = random_ids(Random(7), 600)
    warm = core_of("llama", tokens=40_000, cache_memory=0.5)
    cold = core_of("llama", tokens=40_000, cache_memory=0.0)
    list(warm.run_alone(request(ids)))
    for heads in (((1, 0), (2, 3)), ((0, 2),), None):
        other = request(ids)
        other = replace(other, filter=replace(other.filter, heads=heads))
        events = list(warm.run_alone(other))
        assert cached_tokens(events) >= 580
        assert answer_of(events) == answer_of(list(cold.run_alone(other)))
    warm.check_integrity()


def test_a_document_that_moves_is_read_at_its_new_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that compacts the pool must do so before the pass reads what it shares."""
    warm = core_of("llama", tokens=7_500, cache_memory=0.9)
    cold = core_of("llama", tokens=40_000, cache_memory=0.0)
    rng = Random(6)
    document = random_ids(rng, 670)
    list(warm.run_alone(request(random_ids(rng, 600))))
    list(warm.run_alone(request(document + random_ids(rng, 30))))
    moved: list[int] = []
    move = Memory.move

    def spy(memory: Memory, source: int, target: int, size: int) -> None:
        moved.append(size)
        move(memory, source, target, size)

    monkeypatch.setattr(Memory, "move", spy)
    # what it adds has room only in the first one's place and what is free behind the second one
    second = request(document + random_ids(rng, 700))
    events = list(warm.run_alone(second))
    assert moved == [700 * 5]
    assert cached_tokens(events) == 670
    assert answer_of(events) == answer_of(list(cold.run_alone(second)))
