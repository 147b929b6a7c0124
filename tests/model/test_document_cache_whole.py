"""Prompts read whole go on from what earlier ones have left, and answer as without a cache."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from gemserve.contract.events import Event, Finished, PromptScored, TextDelta
from gemserve.contract.requests import Request
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.engine.sequence.sequence import State
from gemserve.engine.sequence.step_plan import Kept
from tests.model.test_document_cache import answer_of, cached_tokens, core_of, random_ids, request
from tests.model.test_document_cache_kinds import unfiltered as whole

pytestmark = pytest.mark.usefixtures("use_compiled_step")
LAYERS_UNITS = 2 * 4  # of one token: keys and values of the tiny models' layers


@pytest.fixture(scope="module")
def cold() -> Core:
    return core_of("llama", tokens=40_000, cache_memory=0.0)


def run(core: Core, asked: list[Request]) -> list[list[Event]]:
    """The events of requests that arrive at once."""
    events: dict[Job, list[Event]] = {core.add(one): [] for one in asked}
    while not core.is_idle:
        for job, event in core.step():
            events[job].append(event)
        core.check_integrity()
    return list(events.values())


def num_read(core: Core) -> int:
    return core.cache_counts.query_tokens - core.cache_counts.hit_tokens


def test_length_dependent_rope_shares_nothing() -> None:
    warm = core_of("phi3-longrope", tokens=40_000, cache_memory=0.5)
    document = random_ids(Random(1), 500)
    found = [cached_tokens(one) for one in run(warm, [whole(document + [n] * 9) for n in (3, 4)])]
    again = list(warm.run_alone(whole(document + [5] * 9)))
    assert [*found, cached_tokens(again)] == [0, 0, 0]
    assert warm.cache_usage_ratio == 0.0


def test_a_conversation_goes_on_from_its_last_turn(cold: Core) -> None:
    """What was generated is in the cache only as tokens of the next turn's prompt."""
    warm, rng = core_of("llama", tokens=40_000, cache_memory=0.5), Random(2)
    history, found = random_ids(rng, 400), []
    for _ in range(4):
        asked = whole(history)
        events = list(warm.run_alone(asked))
        assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
        found.append(cached_tokens(events))
        history = [*history, *answer_of(events)[1], *random_ids(rng, 300)]
    assert found == [0, 400, 705, 1010]
    # each turn has taken the place of the one before, and room for the answer is not kept
    assert warm.cache_usage_ratio * warm.num_units == pytest.approx(1315 * LAYERS_UNITS)


def test_the_last_token_is_always_computed(cold: Core) -> None:
    warm, ids = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(3), 300)
    first, second = (list(warm.run_alone(whole(ids))) for _ in range(2))
    assert answer_of(first) == answer_of(second) == answer_of(list(cold.run_alone(whole(ids))))
    assert (cached_tokens(first), cached_tokens(second)) == (0, 299)


def test_questions_at_once_read_their_document_once(cold: Core) -> None:
    """They are copied from the first one's memory while that one is still being answered."""
    warm, rng = core_of("llama", tokens=80_000, cache_memory=0.5), Random(4)
    document = random_ids(rng, 600)
    asked = [whole(document + random_ids(rng, 20)) for _ in range(6)]
    for one, events in zip(asked, run(warm, asked), strict=True):
        assert answer_of(events) == answer_of(list(cold.run_alone(one)))
    assert num_read(warm) == 620 + 5 * 20


def test_choices_of_one_prompt_are_read_once(cold: Core) -> None:
    warm, ids = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(5), 400)
    drawn = [
        replace(whole(ids), sampling=replace(whole(ids).sampling, temperature=1.0, seed=seed))
        for seed in range(4)
    ]
    for one, events in zip(drawn, run(warm, drawn), strict=True):
        assert answer_of(events) == answer_of(list(cold.run_alone(one)))
    assert num_read(warm) == 400 + 3


def test_short_prompts_leave_nothing() -> None:
    warm, ids = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(6), 256)
    found = [cached_tokens(list(warm.run_alone(whole(ids)))) for _ in range(2)]
    assert found == [0, 0]
    assert warm.cache_usage_ratio == 0.0
    assert warm.cache_counts.queries == 0


def test_a_prompt_that_is_scored_is_computed_whole(cold: Core) -> None:
    """Its log-probabilities need the logits of every token."""
    warm, ids = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(7), 300)
    list(warm.run_alone(whole(ids)))
    asked = replace(whole(ids), prompt_logprobs=1)
    scores = []
    for core in (warm, cold):
        events = list(core.run_alone(asked))
        assert cached_tokens(events) == 0
        (scored,) = (event for event in events if isinstance(event, PromptScored))
        scores.append([one.token_id for one in scored.logprobs])
    assert scores == [ids[1:], ids[1:]]


@pytest.mark.parametrize("state", [State.PREFILLING, State.DECODING])
def test_what_a_cancelled_request_leaves(state: State, cold: Core) -> None:
    """A prompt that was read to its end is of use; half of one is not kept."""
    warm, document = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(8), 500)
    job = warm.add(whole([*document, 9]))
    while job.sequence.state is not state:
        warm.step()
    warm.cancel(job)
    warm.check_integrity()
    asked = whole([*document, *random_ids(Random(9), 10)])
    events = list(warm.run_alone(asked))
    assert cached_tokens(events) == (500 if state is State.DECODING else 0)
    assert answer_of(events) == answer_of(list(cold.run_alone(asked)))


def test_a_prompt_whose_decode_step_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    core, ids = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(10), 400)

    def fail(*_: object) -> None:
        raise RuntimeError("no logits")

    monkeypatch.setattr(core._runner, "_decode_rows", fail)
    events = list(core.run_alone(whole(ids)))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "error"
    assert core.cache_usage_ratio == 0.0


def test_a_filter_that_falls_back_goes_on_from_a_prompt_read_whole(
    cold: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_all(request: Request, *_: object) -> Kept:
        ids = request.prompt_ids
        return Kept(positions=range(len(ids)), ids=ids, is_diffuse=True)

    monkeypatch.setattr("gemserve.engine.running.runner.choose_positions", keep_all)
    warm, rng = core_of("llama", tokens=40_000, cache_memory=0.5), Random(11)
    document, reused = random_ids(rng, 500), []
    for _ in range(3):
        asked = request([*document, *random_ids(rng, 20)])
        asked = replace(asked, filter=replace(asked.filter, fallback=True))
        job = warm.add(asked)
        events = [event for _ in iter(lambda: warm.is_idle, True) for _, event in warm.step()]
        reused.append((job.sequence.num_cached, job.sequence.num_reused))
        assert answer_of(events) == answer_of(list(cold.run_alone(whole(list(asked.prompt_ids)))))
        warm.check_integrity()
    assert reused == [(0, 0), (500, 500), (500, 500)]


def test_a_stored_document_that_is_forgotten_is_not_copied_from_an_answer() -> None:
    """Its request goes on, but nobody else may take over from it what was deleted."""
    core, document = core_of("llama", tokens=40_000, cache_memory=0.5), random_ids(Random(12), 400)
    sampling = replace(whole(document).sampling, max_tokens=30)
    core.add(replace(whole([*document, 9]), sampling=sampling, documents=("d",)))
    while not any(isinstance(event, TextDelta) for _, event in core.step()):
        pass
    core.forget_documents({"d"})
    job, events = core.add(whole([*document, 10])), []
    while not core.is_idle:
        events += [event for of, event in core.step() if of is job]
    assert cached_tokens(events) == 0
    assert "d" not in core.stored_documents


@pytest.mark.parametrize(("capacity", "count"), [(10, 9), (10, 5), (40, 3), (7, 1), (6, 6)])
def test_rows_are_moved_together_in_place(capacity: int, count: int) -> None:
    """A row must not be written over before it was read."""
    memory = core_of("llama", tokens=1000, cache_memory=0.0)._runner.memory
    memory.rows.zero_()  # what is there by chance may be NaN, which equals nothing
    start, units = 3, 8
    rows = memory.layers(start, num_units=units, capacity=capacity)
    rows.copy_(torch.arange(rows.numel()).view(rows.shape))
    before, behind = memory.rows[:3].clone(), rows[:, :, :count].clone()
    memory.repack(start, units, capacity, count)
    assert memory.layers(start, num_units=units, capacity=count).equal(behind)
    assert memory.rows[:3].equal(before)
