"""A prompt that the cache has whole is not filtered, and what is asked often is read whole idly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemserve.config import EngineConfig
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_segments import ANCHOR, LAYER, UNIT, ids_of
from tests.model.test_selection import NoText

DOCUMENT = ids_of(1, 3000)


def core_of(*, tokens: int = 400_000, **settings: object) -> Core:
    return core_over(
        CausalModel(models.build("llama")),
        NoText(),
        EngineConfig(
            filter_layer=LAYER,
            filter_keep=600,
            filter_min_tokens=0,
            filter_window=512,
            kv_memory_bytes=tokens * UNIT,
            **settings,  # type: ignore[arg-type]
        ),
        frozenset(),
    )


def request(core: Core, question: int, options: FilterOptions | None = None) -> Request:
    ids = [*DOCUMENT, *ids_of(question, 6)]
    asked = len(ids) - 6, len(ids)
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
        filter=core.planner.resolve(options or FilterOptions()),
        protected=(ProtectedRange(*asked, Priority.QUESTION),),
        question=(asked,),
        anchor=ANCHOR,
    )


def answer(core: Core, asked: Request) -> tuple[FilterReport, list[int]]:
    events: list[Event] = list(core.run_alone(asked))
    core.check_integrity()
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length", last.error
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    return report, [t for e in events if isinstance(e, TextDelta) for t in e.token_ids]


def idle(core: Core, most: int = 10_000) -> int:
    """Let the core do what it does while nobody asks. Return the number of steps."""
    for count in range(most):
        if core.is_idle:
            return count
        assert core.step() == [], "nobody waits for events"
        core.check_integrity()
    raise AssertionError("it never rests")


def test_a_prompt_that_is_cached_whole_is_not_filtered() -> None:
    core = core_of()
    none = FilterOptions(method="none")
    answer(core, request(core, 2, none))
    report, drawn = answer(core, request(core, 3))
    assert (report.applied, report.reason, report.window) == (False, "cached", None)
    assert report.cached_tokens == len(DOCUMENT)
    assert report.kept_tokens == len(DOCUMENT) + 6
    assert drawn == answer(core_of(), request(core, 3, none))[1]


@pytest.mark.parametrize(
    "options",
    [
        FilterOptions(method="sieve"),
        FilterOptions(keep=600),
        FilterOptions(window=512),
        FilterOptions(return_selection=True),
    ],
)
def test_a_request_that_says_how_is_filtered(options: FilterOptions) -> None:
    core = core_of()
    answer(core, request(core, 2, FilterOptions(method="none")))
    assert answer(core, request(core, 3, options))[0].applied


def test_a_server_may_filter_always() -> None:
    core = core_of(when_cached="filter")
    answer(core, request(core, 2, FilterOptions(method="none")))
    for question in (3, 4, 5):
        assert answer(core, request(core, question))[0].applied
    assert core.is_idle


def test_a_document_asked_about_twice_is_read_whole_in_idle_time() -> None:
    core = core_of()
    assert answer(core, request(core, 2))[0].applied
    assert core.is_idle, "nobody knows yet whether it is asked about again"
    assert answer(core, request(core, 3))[0].applied
    assert not core.is_idle
    assert core.num_running == core.num_waiting == 0, "nobody asks"
    assert idle(core)
    report, _ = answer(core, request(core, 4))
    assert (report.reason, report.cached_tokens) == ("cached", len(DOCUMENT))
    assert idle(core) == 0


def test_idle_reading_has_as_much_time_as_it_takes() -> None:
    """It ended as its request would have, for a stream that nobody had, and with it the engine."""
    core = core_of()
    answer(core, replace(request(core, 2), begin_within_s=60.0))
    answer(core, replace(request(core, 3), begin_within_s=60.0))
    assert core._is_reading_idly()
    job = core._idle_job
    assert job is not None
    job.added_s -= 1000
    assert idle(core)


def test_a_request_ends_what_is_read_idly_and_what_is_read_stays() -> None:
    core = core_of(max_chunk_tokens=512)
    answer(core, request(core, 2))
    answer(core, request(core, 3))
    while core._idle_job is None or core._idle_job.sequence.done < 2000:
        assert core.step() == []
    job = core.add(request(core, 4, FilterOptions(method="none")))
    reports = _reports(core, job)
    core.check_integrity()
    assert reports[0].cached_tokens >= 2000


def test_what_is_read_idly_makes_no_key_present() -> None:
    """For ten seconds the next request of another key had short steps, and nothing proposed."""
    core = core_of(max_chunk_tokens=512)
    for question in (2, 3):
        answer(core, replace(request(core, question), tenant=b"one"))
    core._present._left_s.clear()  # it left long ago
    while core._idle_job is None:
        assert core.step() == []
    job = core.add(replace(request(core, 4), tenant=b"two"))
    assert core._idle_job is None
    assert core._portion() is None
    core.cancel(job)
    core.check_integrity()


def test_others_documents_are_not_read_for_one() -> None:
    core = core_of()
    answer(core, replace(request(core, 2), tenant=b"one"))
    answer(core, replace(request(core, 3), tenant=b"two"))
    assert core.is_idle
    answer(core, replace(request(core, 4), tenant=b"two"))
    idle(core)
    of_one = answer(core, replace(request(core, 5), tenant=b"one"))[0]
    of_two = answer(core, replace(request(core, 5), tenant=b"two"))[0]
    assert (of_one.reason, of_two.reason) == (None, "cached")


def test_what_does_not_fit_is_not_read() -> None:
    core = core_of(tokens=48_000, cache_memory=0.2)
    for question in (2, 3, 4):
        assert answer(core, request(core, question))[0].applied
        idle(core)


def test_a_forgotten_document_is_not_read() -> None:
    core = core_of()
    core._runner.memory.rows.zero_()  # type: ignore[attr-defined]  # of an earlier test, perhaps
    for question in (2, 3):
        answer(core, replace(request(core, question), documents=("one",)))
    core.forget_documents({"one"})
    idle(core)
    assert core.cache_usage_ratio == 0.0
    assert not core._runner.memory.rows.any()  # type: ignore[attr-defined]


def _reports(core: Core, job: Job) -> list[FilterReport]:
    events = []
    for _ in range(10_000):
        events += [event for of, event in core.step() if of is job]
        if events and isinstance(events[-1], Finished):
            break
    return [event.report for event in events if isinstance(event, Filtered)]
