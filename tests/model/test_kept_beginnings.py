"""Choices that begin with the same instructions go on from each other, and answer as without."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gemserve.contract.events import Event
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.requests import Request
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from tests.model.test_document_cache import answer_of, core_of, random_ids, request

pytestmark = pytest.mark.usefixtures("use_compiled_step")
INSTRUCTIONS, QUESTION = 400, 20


@pytest.fixture(scope="module")
def cold() -> Core:
    return core_of("llama", tokens=40_000, cache_memory=0.0)


def agents(instructions: list[int], document: list[int], method: str = "sieve") -> Request:
    """A request that begins with instructions, and ends with a question."""
    ids = instructions + document
    size = len(ids)
    return replace(
        request(ids),
        filter=FilterParams(method=method, keep=64, return_selection=True),
        protected=(
            ProtectedRange(0, len(instructions), Priority.SYSTEM),
            ProtectedRange(size - QUESTION, size, Priority.QUESTION),
        ),
        question=((size - QUESTION, size),),
    )


def run(core: Core, asked: list[Request]) -> tuple[list[list[Event]], list[int]]:
    """The events of requests that arrive at once, and what their last passes took over."""
    jobs: dict[Job, list[Event]] = {core.add(one): [] for one in asked}
    while not core.is_idle:
        for job, event in core.step():
            jobs[job].append(event)
        core.check_integrity()
    return list(jobs.values()), [job.sequence.num_reused for job in jobs]


@pytest.mark.parametrize("method", ["sieve", "position", "random"])
def test_instructions_are_read_once_by_all_layers(cold: Core, method: str) -> None:
    warm, rng = core_of("llama", tokens=40_000, cache_memory=0.5), Random(1)
    instructions, found = random_ids(rng, INSTRUCTIONS), []
    for _ in range(4):
        asked = agents(instructions, random_ids(rng, 600), method)
        ((events,), reused) = run(warm, [asked])
        assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
        found += reused
    assert found[0] == 0
    assert all(INSTRUCTIONS <= count < INSTRUCTIONS + 64 + QUESTION for count in found[1:])


def test_a_later_choice_takes_the_place_of_an_earlier_one() -> None:
    """Ten turns of an agent held its instructions ten times."""
    warm, rng = core_of("llama", tokens=40_000, cache_memory=0.5), Random(2)
    instructions, sizes = random_ids(rng, INSTRUCTIONS), []
    for _ in range(5):
        run(warm, [agents(instructions, random_ids(rng, 600), "position")])
        sizes.append(warm.cache_usage_ratio)
    assert sizes == [sizes[0]] * 5


def test_many_at_once(cold: Core) -> None:
    """A step copies one document, so the others wait; none is lost, and none reads another's."""
    warm, rng = core_of("llama", tokens=200_000, cache_memory=0.5), Random(3)
    several = [random_ids(rng, INSTRUCTIONS) for _ in range(2)]
    run(warm, [agents(one, random_ids(rng, 500)) for one in several])
    asked = [agents(several[i % 2], random_ids(rng, 500)) for i in range(8)]
    answers, reused = run(warm, asked)
    assert min(reused) >= INSTRUCTIONS
    for one, events in zip(asked, answers, strict=True):
        assert answer_of(events) == answer_of(list(cold.run_alone(one)))


def test_without_instructions_a_choice_leaves_nothing() -> None:
    """Another question about the same document keeps other tokens."""
    warm, rng = core_of("llama", tokens=40_000, cache_memory=0.5), Random(4)
    document = random_ids(rng, 900)
    for _ in range(2):
        _, reused = run(warm, [agents([], document + random_ids(rng, 30))])
        assert reused == [0]
    assert all(document.key.layer is not None for document in warm._scheduler.cache.documents)
