"""One model looks at prompts, another one answers from what was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemserve.calibration.search import calibrated_core
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.core import Core
from gemserve.engine.reader import CoreWithReader
from gemserve.engine.running.runner import Runner
from gemserve.errors import RequestError
from gemserve.llm import LLM
from gemserve.synthetic.prose import topics_sentences
from gemserve.types import (
    Event,
    Filtered,
    FilterOptions,
    Finished,
    Request,
    SamplingParams,
    TextDelta,
)

SETTINGS = EngineConfig(
    kv_memory_bytes=256 << 20, filter_min_tokens=256, filter_keep=64, filter_on_error="reject"
)
WITH_READER = replace(SETTINGS, reader="builtin", reader_memory_bytes=256 << 20)
QUESTION = "The code of the red lamp is 4715.\n\n{}\n\nWhat is the code of the red lamp?"
SELF, READER = FilterOptions(reader="self"), FilterOptions(reader="reader")


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM("builtin", SETTINGS)


@pytest.fixture(scope="module")
def paired() -> LLM:
    return LLM("builtin", WITH_READER)


def prompt(sentences: int = 150, start: int = 0) -> str:
    text = topics_sentences()[start : start + sentences]
    return QUESTION.format("\n\n".join(text))


def request(llm: LLM, name: str, options: FilterOptions = READER, **changes: Any) -> Request:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    made = llm._request(llm.prompt(prompt()), sampling, options, None)
    return replace(made, request_id=name, **changes)


def run(core: Core, jobs: dict[Any, str], steps: int = 4000) -> dict[str, list[Event]]:
    """The events of these jobs, by request, when all have ended."""
    events: dict[str, list[Event]] = {name: [] for name in jobs.values()}
    for _ in range(steps):
        for job, event in core.step():
            events[jobs[job]].append(event)
        core.check_integrity()
        if all(of and isinstance(of[-1], Finished) for of in events.values()):
            return events
    pytest.fail("not all requests have ended")


def distrusted(made: Request) -> Request:
    """A planned request whose choice will not be trusted, so that all of it is read."""
    reading = made.reading
    assert reading is not None
    assert reading.plan is not None
    everything = replace(reading.plan.budget, limit=len(reading.prompt_ids))
    plan = reading.plan.having(coverage_bound=2.0, budget=everything)
    of_reader = replace(reading, plan=plan, filter=replace(reading.filter, fallback=True))
    return replace(made, reading=of_reader)


def test_the_same_model_as_reader_chooses_and_answers_alike(alone: LLM, paired: LLM) -> None:
    options = FilterOptions(return_selection=True)
    expected = alone.generate(prompt(), max_tokens=12, filter=options)
    answer = paired.generate(prompt(), max_tokens=12, filter=options)
    assert answer.token_ids == expected.token_ids
    assert expected.filter.reader is None
    assert answer.filter.reader == "reader"
    same = replace(expected.filter, reader="reader", filter_ms=0.0)
    assert replace(answer.filter, filter_ms=0.0, cached_tokens=same.cached_tokens) == same


def test_a_request_may_have_the_model_itself_look(alone: LLM, paired: LLM) -> None:
    expected = alone.generate(prompt(start=3), max_tokens=12)
    answer = paired.generate(prompt(start=3), max_tokens=12, filter=SELF)
    assert (answer.token_ids, answer.filter.reader) == (expected.token_ids, None)


def test_a_selection_ends_in_the_reader(alone: LLM, paired: LLM) -> None:
    expected, found = alone.select(prompt(start=5)), paired.select(prompt(start=5))
    assert found.passages == expected.passages
    assert found.filter.reader == "reader"


def test_short_prompts_and_other_methods_need_no_reader(paired: LLM) -> None:
    short = paired.generate(prompt(5), max_tokens=2)
    assert (short.filter.reason, short.filter.reader) == ("short_prompt", None)
    whole = paired.generate(prompt(), max_tokens=2, filter=FilterOptions(method="none"))
    assert (whole.filter.reason, whole.filter.reader) == ("disabled", None)
    with pytest.raises(RequestError, match=r"^filter\.reader=reader: only .* it, not none$"):
        paired.generate(prompt(), filter=FilterOptions(method="none", reader="reader"))


def test_without_a_reader_none_can_be_asked(alone: LLM) -> None:
    with pytest.raises(RequestError, match=r"^filter\.reader=reader: this server has no reader"):
        alone.generate(prompt(), filter=READER)
    assert alone.generate(prompt(), max_tokens=2, filter=SELF).filter.reader is None


def test_what_the_reader_distrusts_is_read_whole(paired: LLM) -> None:
    core = paired.core
    made = core.planner.planned(request(paired, "doubtful"))
    doubtful = distrusted(made)
    (events,) = run(core, {core.add(doubtful): "doubtful"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.kept_tokens) == ("diffuse_attention", len(made.prompt_ids))
    assert sum(isinstance(event, TextDelta) for event in events) == 8


def test_each_request_gets_its_events_in_order_and_one_end(paired: LLM) -> None:
    core = paired.core
    requests = [request(paired, f"{n}", [READER, SELF][n % 2]) for n in range(6)]
    requests.append(request(paired, "selection", selects_only=True))
    jobs = {core.add(one): one.request_id for one in requests}
    for name, events in run(core, jobs).items():
        kinds = [type(event) for event in events]
        tokens = 0 if name == "selection" else 8
        assert kinds == [Filtered, *[TextDelta] * tokens, Finished]
    assert (core.num_running, core.num_waiting) == (0, 0)
    assert core.is_idle or core.cache_usage_ratio > 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6, 9, 14])
def test_a_cancelled_request_leaves_nothing(paired: LLM, steps: int) -> None:
    core = paired.core
    job = core.add(request(paired, "left", sampling=SamplingParams(max_tokens=50, ignore_eos=True)))
    ended = False
    for _ in range(steps):
        ended = any(isinstance(event, Finished) for _, event in core.step()) or ended
    emitted = core.cancel(job)
    assert [type(event) for _, event in emitted] == ([] if ended else [Finished])
    assert all(owner is job for owner, _ in emitted)
    assert core.cancel(job) == []
    core.check_integrity()
    assert (core.num_running, core.num_waiting) == (0, 0)


def test_streams_go_on_while_the_reader_reads(paired: LLM) -> None:
    core = paired.core
    plain = FilterOptions(method="none")
    long = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    stream = paired._request(paired.prompt(prompt(3)), long, plain, None)
    job = core.add(stream)
    while not any(isinstance(event, TextDelta) for _, event in core.step()):
        pass
    made = paired._request(paired.prompt(prompt(400)), long, READER, None)
    reading, drawn = core.add(made), 0
    for _ in range(4000):
        emitted = core.step()
        drawn += sum(isinstance(event, TextDelta) for owner, event in emitted if owner is job)
        if any(isinstance(event, Filtered) for owner, event in emitted if owner is reading):
            break
    assert drawn > 0
    core.cancel(job)
    core.cancel(reading)


@pytest.mark.parametrize("keeps_going", [False, True])
def test_a_reader_that_fails(keeps_going: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(WITH_READER, filter_on_error="full" if keeps_going else "reject")
    llm = LLM("builtin", settings)
    assert isinstance(llm.core, CoreWithReader)

    def fail(*_: object) -> None:
        raise RuntimeError("weights are gone")

    monkeypatch.setattr(Runner, "_choose", fail)
    core = llm.core
    (events,) = run(core, {core.add(request(llm, "unlucky")): "unlucky"}).values()
    end = events[-1]
    assert isinstance(end, Finished)
    if keeps_going:
        (report,) = [event.report for event in events if isinstance(event, Filtered)]
        assert (end.reason, report.reason) == ("length", "error")
        assert report.kept_tokens == report.prompt_tokens
    else:
        assert (end.reason, end.error) == ("error", "RuntimeError: weights are gone")
    assert (core.num_running, core.num_waiting) == (0, 0)


def test_a_second_question_finds_what_the_reader_has_read(paired: LLM) -> None:
    first = paired.generate(prompt(300, start=60), max_tokens=2)
    again = paired.generate(
        prompt(300, start=60).replace("What is", "Tell me"), max_tokens=2, filter=READER
    )
    assert first.filter.windows
    assert again.filter.cached_windows == again.filter.windows


def test_a_library_is_read_by_the_reader(paired: LLM, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(prompt(200).rpartition("\n\n")[0])
    library = paired.library(tmp_path / "library", is_new=True)
    *_, done = paired.add_files(library, [str(file)])
    assert done.files == 1
    asked = paired.ask_libraries("What is the code of the red lamp?", [library])
    answer = paired.generate(asked, max_tokens=8)
    assert answer.filter.reader == "reader"
    assert answer.filter.sources
    assert "4715" in " ".join(source.text for source in answer.filter.sources)


def test_a_reader_that_saves_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    core = calibrated_core.build_calibrated_core(ModelConfig(model="builtin"), WITH_READER)
    assert "is faster" not in capfd.readouterr().err
    large = replace(core.model.shape, num_layers=1)  # one layer answers, so reading costs more

    class Small:
        name = "small"

        class model:
            shape = large

    calibrated_core._warn_if_slow(core, Small)  # type: ignore[arg-type]
    assert "times the work of reading with small itself" in capfd.readouterr().err
