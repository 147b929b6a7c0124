"""`Retry-After` says how long what waits will take, from tokens and their rate."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from gemserve.api.access.backlog import Backlog, BacklogJob
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import QueueFull
from tests.fakes import Clock, report_for


def request(prompt: int, answer: int, tenant: bytes = b"") -> Request:
    return Request(
        request_id="r",
        tenant=tenant,
        prompt_ids=[5] * prompt,
        sampling=SamplingParams(max_tokens=answer),
        filter=FilterParams(method="none", keep=64),
    )


def read(job: BacklogJob, asked: Request) -> None:
    report: FilterReport = replace(report_for(asked), applied=True, filter_ms=1.0)
    job.see(Filtered(report=report, started_s=0, filtered_s=0))


def draw(job: BacklogJob, tokens: int) -> None:
    job.see(TextDelta(text="", token_ids=(7,) * tokens, drawn_s=0))


def test_without_a_measured_rate_it_is_a_second() -> None:
    backlog = Backlog(Clock())
    assert backlog.retry_after_s() == 1
    job = backlog.enter(request(10_000, 4000))
    assert backlog.retry_after_s() == 1
    job.close()


def test_it_grows_with_the_queue_and_shrinks_with_the_work() -> None:
    """It was always one second, so that clients came back to a queue that was still full."""
    clock = Clock()
    backlog = Backlog(clock)
    asked = request(900, 100)
    first, *others = [backlog.enter(asked) for _ in range(10)]
    clock.now_s += 3
    read(first, asked)
    clock.now_s += 1
    draw(first, 100)  # 1,000 tokens in four seconds
    first.see(Finished(reason="stop", completion_tokens=100))
    full = backlog.retry_after_s()
    assert 34 <= full <= 38  # nine others
    for job in others[:6]:
        job.close()
        job.close()
    assert backlog.retry_after_s() < full / 2
    backlog.enter(request(1_000_000, 10)).close()
    jobs = [backlog.enter(request(1_000_000, 10))]
    assert backlog.retry_after_s() == 60
    jobs[0].close()
    for job in others:
        job.close()
    clock.now_s += 500  # nothing to do, which says nothing about the rate
    job = backlog.enter(asked)
    assert 3 <= backlog.retry_after_s() <= 5
    job.close()


def test_answers_are_expected_to_be_as_long_as_earlier_ones() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    asked = request(10, 4000)
    job = backlog.enter(asked)
    read(job, asked)
    clock.now_s += 1
    draw(job, 10)
    assert backlog.retry_after_s() == 12  # 256 tokens are usual, and 20 came in a second
    job.see(Finished(reason="stop", completion_tokens=10))
    other = backlog.enter(asked)
    assert backlog.retry_after_s() <= 2
    other.see(Finished(reason="abort", completion_tokens=0))


def test_a_request_that_is_never_read_is_forgotten() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    asked = request(10, 10)
    job = backlog.enter(asked)
    clock.now_s += 1
    read(job, asked)
    job.close()
    backlog.enter(request(10_000, 10))
    gc.collect()
    assert backlog.retry_after_s() == 1


def test_the_wait_of_a_tenant_does_not_grow_with_others_queues() -> None:
    """Beside a client that sends far too much, everybody would be refused."""
    clock = Clock()
    backlog = Backlog(clock)
    first = backlog.enter(request(1000, 1, b"greedy"))
    clock.now_s += 1
    read(first, request(1000, 1))
    first.see(Finished(reason="stop", completion_tokens=0))  # 1,000 tokens a second
    jobs = [backlog.enter(request(1000, 1, b"greedy")) for _ in range(20)]
    assert backlog.wait_s(b"greedy") == pytest.approx(20, rel=0.1)
    assert backlog.wait_s(b"polite") == 0
    jobs.append(backlog.enter(request(1000, 1, b"polite")))
    assert backlog.wait_s(b"polite") == pytest.approx(2, rel=0.1)
    for job in jobs:
        job.close()
    assert backlog.wait_s(b"greedy") == 0


def test_prompts_that_are_not_read_have_a_limit_together() -> None:
    """128 prompts of a model's whole context would wait in gigabytes of memory."""
    backlog = Backlog(Clock(), max_tokens=100)
    backlog.check_room(b"", 1000)  # alone it may be of any length
    asked = request(prompt=60, answer=5)
    job = backlog.enter(asked)
    backlog.check_room(b"", 40)
    with pytest.raises(QueueFull, match="60 tokens of prompts wait, the limit is 100"):
        backlog.check_room(b"", 41)
    read(job, asked)
    backlog.check_room(b"", 41)
    job.close()
    backlog.check_room(b"", 101)


def test_requests_that_are_being_tokenized_count_as_usual_ones() -> None:
    """A burst found room all at once, while the first of it were parsed, and was answered late."""
    clock = Clock()
    backlog = Backlog(clock)
    asked = request(900, 100, b"a")
    for _ in range(100):
        job = backlog.enter(asked)
        clock.now_s += 1
        read(job, asked)
        draw(job, 100)
        job.see(Finished(reason="stop", completion_tokens=100))
        job.close()
    assert backlog.wait_s(b"a") == 0
    size = 3600  # bytes, about 900 tokens, and an answer of 100
    with (
        backlog.expecting(b"a", size),
        backlog.expecting(b"a", size),
        backlog.expecting(b"a", size),
    ):
        assert backlog.wait_s(b"a") == pytest.approx(3, rel=0.1)
        assert backlog.wait_s(b"b") == 0
        assert backlog.tokens_left == 0, "the relay counts them itself"
        backlog.check_room(b"", 1 << 61)
    assert backlog.wait_s(b"a") == 0


def test_parsing_says_nothing_about_the_rate() -> None:
    """After a text that took two minutes to parse, short requests were told to wait for hours."""
    clock = Clock()
    backlog = Backlog(clock)
    asked = request(900, 100, b"a")
    job = backlog.enter(asked)
    clock.now_s += 1
    read(job, asked)
    draw(job, 100)
    job.see(Finished(reason="stop", completion_tokens=100))
    with backlog.expecting(b"a", 1_000_000):
        clock.now_s += 120
    other = backlog.enter(asked)
    assert backlog.wait_s(b"a") == pytest.approx(1, rel=0.1)
    other.close()


def test_a_long_prompt_is_read_as_fast_as_others_until_it_should_be_over() -> None:
    """Its time counted at once and its tokens at its end: others would wait for hours, it said."""
    clock = Clock()
    backlog = Backlog(clock)
    first = backlog.enter(request(1000, 1))
    clock.now_s += 10  # 100 tokens a second
    read(first, request(1000, 1))
    first.see(Finished(reason="stop", completion_tokens=1))
    job = backlog.enter(request(10_000, 1))
    clock.now_s += 50
    assert backlog.wait_s(b"") == pytest.approx(50, rel=0.05)
    clock.now_s += 40
    assert backlog.wait_s(b"") == pytest.approx(10, rel=0.1)
    clock.now_s += 60  # it takes longer than expected, and nobody knows how long
    assert 0 <= backlog.wait_s(b"") < 10
    read(job, request(10_000, 1))
    job.see(Finished(reason="stop", completion_tokens=1))
    later = backlog.enter(request(10_000, 1))
    assert backlog.retry_after_s() == 60  # 150 s, as the last one
    later.close()


def test_a_prompt_that_is_not_filtered_is_read_when_its_answer_begins() -> None:
    """Its report comes when reading begins: its time counted for the others, and it for nothing."""
    clock = Clock()
    backlog = Backlog(clock)
    first, asked = backlog.enter(request(1000, 1)), request(10_000, 1)
    clock.now_s += 10
    read(first, request(1000, 1))
    first.see(Finished(reason="stop", completion_tokens=1))
    job = backlog.enter(asked)
    job.see(Filtered(report=report_for(asked), started_s=0, filtered_s=0))
    assert backlog.wait_s(b"") == pytest.approx(100, rel=0.05)
    with pytest.raises(QueueFull):
        backlog.check_room(b"", 1 << 62)
    clock.now_s += 100
    draw(job, 1)
    assert backlog.wait_s(b"") < 1
    job.close()


def learned(clock: Clock, **settings: int) -> Backlog:
    """One that knows: a thousand tokens of a prompt take a second, and one of an answer 20 ms."""
    backlog = Backlog(clock, **settings)
    for prompt in (1000, 2000, 500) * 20:
        asked = request(prompt, 20)
        job = backlog.enter(asked)
        clock.now_s += prompt / 1000
        draw(job, 1)
        for _ in range(19):
            clock.now_s += 0.02
            draw(job, 1)
        job.see(Finished(reason="length", completion_tokens=20))
    return backlog


def test_a_long_prompt_is_nearly_read_though_a_stream_is_drawn_beside_it() -> None:
    """Each token of the stream set its time back, and the speed of all prompts seemed to fall."""
    clock = Clock()
    backlog = learned(clock)
    stream = backlog.enter(request(10, 4000))
    draw(stream, 1)
    job = backlog.enter(request(60_000, 20))
    waits = []
    for _ in range(7):
        waits.append(backlog.wait_s(b""))
        for _ in range(200):
            clock.now_s += 0.05
            draw(stream, 1)
    assert waits[0] == pytest.approx(65, rel=0.2)
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 35
    job.close()
    stream.close()


def test_what_was_read_of_a_cancelled_prompt_counts_for_no_other() -> None:
    """Its minute counted as half of the next one's, which then seemed to take twice as long."""
    clock = Clock()
    backlog = learned(clock)
    first, second = (backlog.enter(request(60_000, 20)) for _ in range(2))
    alone_s = backlog.wait_s(b"") / 2
    clock.now_s += 55
    first.see(Finished(reason="abort", completion_tokens=0))
    assert backlog.wait_s(b"") == pytest.approx(alone_s, rel=0.1)
    clock.now_s += 60
    draw(second, 20)
    second.see(Finished(reason="stop", completion_tokens=20))
    backlog.enter(request(60_000, 20))
    third = backlog.enter(request(60_000, 20))
    assert backlog.wait_s(b"") < 1.3 * alone_s
    third.close()


def test_the_time_of_a_request_that_was_never_begun_is_others() -> None:
    clock = Clock()
    backlog = learned(clock)
    first, second = (backlog.enter(request(60_000, 20)) for _ in range(2))
    clock.now_s += 30
    before_s = backlog.wait_s(b"")
    second.see(Finished(reason="abort", completion_tokens=0, is_unread=True))
    assert backlog.wait_s(b"") < before_s / 2
    first.close()


def test_selections_say_nothing_about_the_length_of_answers() -> None:
    """After a few of them answers seemed to have no tokens, and nine times too many were let in."""
    clock = Clock()
    backlog = learned(clock)
    job = backlog.enter(request(1000, 20))
    expected_s = backlog.wait_s(b"")
    job.close()
    for _ in range(40):
        asked = replace(request(1000, 20), selects_only=True)
        selecting = backlog.enter(asked)
        clock.now_s += 1
        read(selecting, asked)
        selecting.see(Finished(reason="stop", completion_tokens=0))
    job = backlog.enter(request(1000, 20))
    assert backlog.wait_s(b"") == pytest.approx(expected_s, rel=0.2)
    job.close()


def test_choices_of_a_prompt_count_it_once() -> None:
    """One request for 32 answers to a long prompt filled the queue for all other keys."""
    clock = Clock()
    backlog = learned(clock, max_tokens=100_000)
    asked = request(60_000, 20, b"a")
    jobs = [backlog.enter(asked, is_further_choice=index > 0) for index in range(32)]
    backlog.check_room(b"a", 40_000)
    assert backlog.wait_s(b"a") == pytest.approx(60 + 32 * 0.4, rel=0.2)
    for job in jobs:
        job.close()


def test_a_key_of_which_nothing_waits_has_room() -> None:
    """Long prompts of one key kept all others from being let in."""
    backlog = Backlog(Clock(), max_tokens=100)
    job = backlog.enter(request(100, 5, b"a"))
    backlog.check_room(b"b", 1000)
    other = backlog.enter(request(1000, 5, b"b"))
    for tenant in (b"a", b"b"):
        with pytest.raises(QueueFull):
            backlog.check_room(tenant)
    job.close()
    other.close()


def taught(clock: Clock, prompt_s: float) -> Backlog:
    """After twenty prompts of 1,000 tokens and answers of 10."""
    backlog, asked = Backlog(clock), request(1000, 10)
    for _ in range(20):
        job = backlog.enter(asked)
        clock.now_s += prompt_s
        read(job, asked)
        clock.now_s += 0.1
        draw(job, 10)
        job.see(Finished(reason="stop", completion_tokens=10))
    return backlog


@pytest.mark.parametrize("is_applied", [True, False])
def test_selections_count_as_read_whatever_was_chosen(is_applied: bool) -> None:
    """With diffuse attention they never did: four were always queued, and the wait was zero."""
    clock = Clock()
    backlog = taught(clock, 2.0)
    asked = replace(request(1000, 1), selects_only=True)
    queued = [backlog.enter(asked) for _ in range(4)]
    for _ in range(30):
        clock.now_s += 2
        job = queued.pop(0)
        report = replace(report_for(asked), applied=is_applied, filter_ms=2000.0)
        job.see(Filtered(report=report, started_s=0, filtered_s=0))
        job.see(Finished(reason="stop", completion_tokens=0))
        queued.append(backlog.enter(asked))
    assert backlog.wait_s(b"") == pytest.approx(8, rel=0.1)


def test_one_prompt_that_takes_long_does_not_make_the_others_read() -> None:
    """Five were queued, the first one was not cached, and after three seconds none was left."""
    clock = Clock()
    backlog = taught(clock, 0.5)
    asked = replace(request(1000, 1), selects_only=True)
    jobs = [backlog.enter(asked) for _ in range(5)]
    waits_s = [backlog.wait_s(b"")]
    for _ in range(10):
        clock.now_s += 3
        waits_s.append(backlog.wait_s(b""))
    assert waits_s == sorted(waits_s)
    assert waits_s[0] == pytest.approx(2.5, rel=0.2)
    assert len(jobs) == 5


def test_a_further_choice_is_not_a_prompt_that_is_read() -> None:
    """The time for which it waited counted as what is read of prompts that came later."""
    clock = Clock()
    backlog = taught(clock, 1.0)
    asked = request(1000, 10)
    first = backlog.enter(asked)
    clock.now_s += 1
    read(first, asked)
    further = backlog.enter(asked, is_further_choice=True)
    clock.now_s += 30
    later = [backlog.enter(request(4000, 10)) for _ in range(3)]
    assert backlog.wait_s(b"") == pytest.approx(12, rel=0.15)
    assert further is not None
    assert len(later) == 3
