"""One model looks at prompts, another one answers from what was chosen."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemserve.calibration.search import calibrated_core
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions, FilterParams
from gemserve.contract.prompt_parts import NO_BREAKS
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.cache.state import StoredDocument
from gemserve.engine.core import Core
from gemserve.engine.reader import CoreWithReader, ReaderCore, ReadJob, _reading_of
from gemserve.engine.reuse.idle_reading import Asked
from gemserve.engine.running.runner import Runner
from gemserve.errors import ConfigError, ModelError, RequestError
from gemserve.llm import LLM
from gemserve.prompting.ranked_texts import RankedTexts
from gemserve.synthetic.prose import topics_sentences
from gemserve_library.api.timed_reading import read_in_time
from gemserve_library.in_process import LibrariesOf
from gemserve_library.ranking.requests import reading_request

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
    made = llm.request(llm.prompt(prompt()), sampling, options, None)
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
    assert (answer.token_ids, answer.filter.reader) == (expected.token_ids, "self")


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


def test_what_the_reader_distrusts_the_model_looks_at_itself(alone: LLM, paired: LLM) -> None:
    core = paired.core
    doubtful = distrusted(core.planner.planned(request(paired, "doubtful")))
    (events,) = run(core, {core.add(doubtful): "doubtful"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    expected = alone.generate(prompt(), max_tokens=8)
    assert (report.reader, report.reason) == ("self", None)
    assert report.kept_tokens == expected.filter.kept_tokens
    tokens = [token for e in events if isinstance(e, TextDelta) for token in e.token_ids]
    assert tokens[: len(expected.token_ids)] == list(expected.token_ids)[: len(tokens)]


def unmeasured(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says when the answering model's own choice is to be trusted."""
    calibration = replace(core.planner.calibration, is_measured=False)
    monkeypatch.setattr(core, "planner", replace(core.planner, calibration=calibration))


def test_what_the_reader_distrusts_is_read_whole_without_a_calibration(
    paired: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = paired.core
    made = core.planner.planned(request(paired, "doubtful"))
    doubtful = distrusted(made)
    unmeasured(core, monkeypatch)
    (events,) = run(core, {core.add(doubtful): "doubtful"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.reader) == ("diffuse_attention", "reader")
    assert report.kept_tokens == len(made.prompt_ids)
    assert sum(isinstance(event, TextDelta) for event in events) == 8


def test_what_the_model_cannot_look_at_is_read_whole(
    paired: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RequestError("no memory for it", param=None)

    core = paired.core
    doubtful = distrusted(core.planner.planned(request(paired, "doubtful")))
    monkeypatch.setattr(type(core.planner), "looking_itself", fails)
    (events,) = run(core, {core.add(doubtful): "doubtful"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.reader) == ("diffuse_attention", "reader")
    assert sum(isinstance(event, TextDelta) for event in events) == 8


def test_heads_and_windows_of_a_request_are_the_readers(paired: LLM) -> None:
    core = paired.core
    for options in (
        FilterOptions(reader="reader", window=512),
        FilterOptions(reader="reader", heads=((0, 0),)),
    ):
        made = core.planner.planned(request(paired, "own", options))
        assert core.planner.looking_itself(made) is None


def test_a_selection_that_the_reader_distrusts_ends_there(paired: LLM) -> None:
    core = paired.core
    made = request(paired, "doubtful", selects_only=True)
    doubtful = distrusted(core.planner.planned(made))
    (events,) = run(core, {core.add(doubtful): "doubtful"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.reader) == ("diffuse_attention", "reader")


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


def test_what_has_waited_too_long_ends_in_the_reader(paired: LLM) -> None:
    job = paired.core.add(request(paired, "late", begin_within_s=0.0))
    assert isinstance(job, ReadJob)
    time.sleep(0.01)
    (end,) = run(paired.core, {job: "late"})["late"]
    assert isinstance(end, Finished)
    assert (end.reason, end.is_unread) == ("error", True)


def test_what_the_reader_has_begun_is_answered(paired: LLM) -> None:
    job = paired.core.add(request(paired, "begun", begin_within_s=60.0))
    while job.answer is None:
        paired.core.step()
    assert job.answer.request.begin_within_s == math.inf
    assert isinstance(run(paired.core, {job: "begun"})["begun"][-1], Finished)
    job = paired.core.add(request(paired, "left"))
    while job.answer is None:
        paired.core.step()
    ((_, end),) = paired.core.cancel(job)
    assert isinstance(end, Finished)
    assert not end.is_unread, "its key pays for what was read"


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
    stream = paired.request(paired.prompt(prompt(3)), long, plain, None)
    job = core.add(stream)
    while not any(isinstance(event, TextDelta) for _, event in core.step()):
        pass
    made = paired.request(paired.prompt(prompt(400)), long, READER, None)
    reading, drawn = core.add(made), 0
    for _ in range(4000):
        emitted = core.step()
        drawn += sum(isinstance(event, TextDelta) for owner, event in emitted if owner is job)
        if any(isinstance(event, Filtered) for owner, event in emitted if owner is reading):
            break
    assert drawn > 0
    core.cancel(job)
    core.cancel(reading)


def test_the_reader_reads_while_streams_of_two_keys_go_on(paired: LLM) -> None:
    """It waited until all streams but those of one key had ended."""
    core, streams = paired.core, list[Any]()
    long = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
    for tenant, sentences in ((b"alice", 3), (b"bob", 60)):
        text = paired.prompt(prompt(sentences))
        made = paired.request(text, long, FilterOptions(method="none"), None)
        streams.append(core.add(replace(made, tenant=tenant)))
        is_drawn = False
        while not is_drawn:
            emitted = core.step()
            is_drawn = any(job is streams[-1] and isinstance(e, TextDelta) for job, e in emitted)
    reading, news = core.add(request(paired, "read", tenant=b"carol")), list[tuple[Any, Event]]()
    while not news:
        news = [each for each in core.step() if isinstance(each[1], (Filtered, Finished))]
    ((job, event),) = news
    assert job is reading
    assert isinstance(event, Filtered)
    for job in (*streams, reading):
        core.cancel(job)


def test_both_models_read_while_a_stream_goes_on(paired: LLM) -> None:
    """Decode steps took the turns of one of them, whose prompts waited for the stream's end."""
    core, jobs = paired.core, list[Any]()
    long = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
    for text, options in (
        (prompt(3), FilterOptions(method="none")),
        (prompt(150, 20), FilterOptions(method="none")),
        (prompt(150, 40), READER),
    ):
        jobs.append(core.add(paired.request(paired.prompt(text), long, options, None)))
        while len(jobs) == 1 and not jobs[0].sequence.generated:
            core.step()
    stream, whole, reading = jobs
    read = 0  # by the reader, which begins anew when it has chosen
    while reading.answer is None and not whole.sequence.generated:
        read = max(read, reading.reading.sequence.done + reading.reading.sequence.open_tokens)
        core.step()
        assert len(stream.sequence.generated) < 2000
    assert whole.sequence.done + whole.sequence.open_tokens > 200
    assert read > 200
    for job in jobs:
        core.cancel(job)


def test_what_is_read_in_idle_time_waits_for_the_reader(paired: LLM) -> None:
    """A question was looked at half as fast while a document was read that nobody had asked for."""
    core: Any = paired.core
    one = SamplingParams(max_tokens=1, temperature=0.0)
    made = paired.request(paired.prompt(prompt(150, 80)), one, SELF, None)
    known = core.planner.planned(made)
    core._idle._asked[0] = Asked(known, len(known.prompt_ids) - 1)
    while core._idle_job is None:
        core.step()
    reading = core.add(request(paired, "asked"))
    assert all(core._is_reader_next() for _ in range(4))
    core.cancel(reading)
    while not core.is_idle:
        core.step()
    core.check_integrity()


def test_a_selection_that_needs_no_reading_does_not_wait_for_the_reader(paired: LLM) -> None:
    core, one = paired.core, SamplingParams(max_tokens=1, temperature=0.0)
    reading: Any = core.add(paired.request(paired.prompt(prompt(150, 60)), one, READER, None))
    short = paired.request(paired.prompt(prompt(5)), one, FilterOptions(), None)
    selection = core.add(replace(short, selects_only=True))
    while not any(job is selection and isinstance(e, Finished) for job, e in core.step()):
        assert reading.answer is None
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


@pytest.mark.parametrize("changes", [{"tenant": b"bob"}, {"cache_salt": "b"}])
def test_the_reader_shares_nothing_between_keys(paired: LLM, changes: dict[str, Any]) -> None:
    """What it reads is made where a request is built, before it is known whose it is."""
    text = prompt(150, start=700)
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    planned = paired.core.planner.planned(
        paired.request(paired.prompt(text), sampling, READER, None)
    )
    found: list[int | None] = []
    name = f"of {changes}"  # an id is never used again
    for of in ({"tenant": b"alice"}, {"tenant": b"alice", **changes}, {"tenant": b"alice"}):
        asked = replace(planned, documents=(name,), **of)
        (events,) = run(paired.core, {paired.core.add(asked): "asked"}).values()
        (report,) = [event.report for event in events if isinstance(event, Filtered)]
        found.append(report.cached_windows)
    assert found[:2] == [0, 0]
    assert found[2]
    assert name in paired.core.stored_documents, "what is deleted must be deleted there, too"
    paired.core.forget_documents([name])
    assert name not in paired.core.stored_documents


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
    library = LibrariesOf(paired).open(tmp_path / "library", is_new=True)
    *_, done = LibrariesOf(paired).add_files(library, [str(file)])
    assert done.files == 1
    asked = LibrariesOf(paired).prompt("What is the code of the red lamp?", [library])
    answer = paired.generate(asked, max_tokens=8)
    assert answer.filter.reader == "reader"
    assert answer.filter.sources
    assert "4715" in " ".join(source.text for source in answer.filter.sources)


def test_a_reader_that_saves_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    calibrated_core.build_calibrated_core(ModelConfig(model="builtin"), WITH_READER)
    said = "the reader's pass takes 1.0 times the work of that of builtin itself"
    assert said in capfd.readouterr().err


def test_errors_say_that_they_are_the_readers() -> None:
    with pytest.raises(ConfigError, match=r"^reader=builtin: reader_memory=1: must be at least"):
        LLM("builtin", replace(WITH_READER, reader_memory_bytes=1))
    with pytest.raises(ModelError, match=r"^reader=README.md: "):
        LLM("builtin", replace(WITH_READER, reader="README.md"))


def test_any_method_of_the_model_may_have_a_reader() -> None:
    llm = LLM("builtin", replace(WITH_READER, filter_method="none", filter_keep=None))
    assert llm.generate(prompt(), max_tokens=2).filter.reader is None
    options = FilterOptions(method="sieve", keep=64)
    assert llm.generate(prompt(), max_tokens=2, filter=options).filter.reader == "reader"


def test_the_reader_needs_no_memory_for_the_answer() -> None:
    small = LLM("builtin", replace(WITH_READER, reader_memory_bytes=24 << 20))
    sampling = SamplingParams(max_tokens=20_000, ignore_eos=True)
    asked = request(small, "long", sampling=sampling)
    small.core.check(small.core.planner.planned(asked))
    tiny = LLM("builtin", replace(WITH_READER, reader_memory_bytes=1 << 20))
    with pytest.raises(RequestError) as caught:
        tiny.core.check(tiny.core.planner.planned(asked))
    assert str(caught.value).startswith("For the reader: prompt: a prompt of ")
    assert str(caught.value).endswith(
        " (--reader-memory). With filter.reader=self the model itself looks."
    )
    assert (caught.value.param, caught.value.code) == ("filter.reader", "kv_memory_exceeded")


def test_what_the_answer_needs_counts_for_what_is_kept(paired: LLM) -> None:
    planner = paired.core.planner
    asked = request(paired, "a")
    num_tokens = len(asked.prompt_ids)
    asked = replace(asked, filter=replace(asked.filter, fallback=True))
    for beyond in (0, 1, 50):
        sampling = SamplingParams(max_tokens=planner.longest_sequence - num_tokens + beyond)
        reading = planner.planned(replace(asked, sampling=sampling)).reading
        assert reading is not None
        assert reading.plan is not None
        assert reading.plan.budget.limit == num_tokens - beyond


def test_documents_that_both_have_are_pinned_if_one_pins_them(
    paired: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"a": StoredDocument(3, 30, True), "b": StoredDocument(1, 10, False)}
    others = {"a": StoredDocument(2, 20, False), "c": StoredDocument(4, 40, True)}
    stored = property(lambda core: others if isinstance(core, ReaderCore) else own)
    monkeypatch.setattr(Core, "stored_documents", stored)
    merged = {"a": StoredDocument(5, 30, True), "b": own["b"], "c": others["c"]}
    assert paired.core.stored_documents == merged


def test_a_prompt_that_is_read_as_one_must_fit_the_readers_context(paired: LLM) -> None:
    planner = paired.core.planner
    assert planner.reader is not None
    short = replace(planner.reader.planner, longest_pass=500)
    limited = replace(planner, reader=replace(planner.reader, planner=short))
    params = limited.resolve(FilterOptions(window="off", keep=64, reader="reader"))
    assert limited.most_tokens(params, (), 5000) == 500
    whole = limited.resolve(FilterOptions(method="none"))
    assert limited.most_tokens(whole, (), 5000) == planner.longest_pass


def test_candidates_are_read_by_the_reader_one_by_one(paired: LLM, tmp_path: Path) -> None:
    """As for `filter.max_seconds`."""
    for number in range(4):
        text = prompt(120, start=100 * number).rpartition("\n\n")[0]
        (tmp_path / f"{number}.txt").write_text(text)
    library = LibrariesOf(paired).open(tmp_path / "library", is_new=True)
    list(LibrariesOf(paired).add_files(library, [str(path) for path in tmp_path.glob("*.txt")]))
    asked = LibrariesOf(paired).prompt("What is the code of the red lamp?", [library])
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    made = paired.request(asked, sampling, READER, None)
    # as in a server, where requests are built before it is known whose they are
    planned = replace(paired.core.planner.planned(made), tenant=b"nobody else", cache_salt="salt")
    submitted: list[Request] = []

    async def read(part: Request) -> Finished:
        submitted.append(part)
        (events,) = run(paired.core, {paired.core.add(part): "part"}).values()
        assert isinstance(events[-1], Finished)
        return events[-1]

    ends_s = time.monotonic() + 600
    ranks = asyncio.run(read_in_time(planned, read, ends_s))
    assert ranks == {excerpt.rank for excerpt in planned.excerpts}
    assert submitted
    assert all(part.filter.reader == "reader" for part in submitted)
    assert {(part.tenant, part.cache_salt) for part in submitted} == {(b"nobody else", "salt")}
    (events,) = run(paired.core, {paired.core.add(planned): "all"}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert report.windows
    assert report.cached_windows == report.windows


def test_what_a_server_knows_later_reaches_the_reader(paired: LLM) -> None:
    """Its report had no first difference, and a pinned document was not pinned."""
    planned = paired.core.planner.planned(request(paired, "r"))
    planned = replace(planned, first_difference="message 3", pin=True)
    reading = _reading_of(planned)
    assert reading is not None
    assert (reading.first_difference, reading.pin) == ("message 3", True)


def test_an_adapter_is_of_the_model_that_answers() -> None:
    """It ran in the reader, too, whose layers are others."""
    texts = RankedTexts(
        ids=(1, 2), ranges=((0, 2),), breaks=NO_BREAKS, query=(3,), end=(), anchor=(1,), words=()
    )
    adapter: Any = SimpleNamespace(name="x", version="1", num_positions=0)
    for reader, expected in (("reader", None), ("self", adapter)):
        params = FilterParams(method="sieve", keep=16, reader=reader)
        planner: Any = SimpleNamespace(plan_documents=lambda *_, p=params, **__: (p, None))
        made = reading_request(planner, texts, request_id="r", adapter=adapter)
        assert made.adapter is expected
