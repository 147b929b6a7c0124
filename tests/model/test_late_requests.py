"""What the core does with requests whose first token would come too late."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gemserve.contract.events import Finished
from gemserve.engine.scheduling.scheduler import Scheduler
from tests.model.test_progress import IDS, core_of, progress_of, request


def test_what_would_come_too_late_is_not_begun() -> None:
    """It was read all the same, so that under overload most answers came too late."""
    core = core_of(max_running=1)
    first = core.add(request(ids=IDS[::-1]))
    passed = core.add(replace(request(), request_id="passed", begin_within_s=0.0))
    waits = core.add(replace(request(), request_id="waits", begin_within_s=1000.0))
    ((job, end),) = core.step()
    assert job is passed
    assert isinstance(end, Finished)
    assert (end.reason, end.is_unread, end.completion_tokens) == ("error", True, 0)
    core.step()
    core.cancel(first)
    assert core.progress(waits) is not None
    core.cancel(waits)
    core.check_integrity()
    assert core.is_idle


def test_a_long_prompt_is_read_if_only_waiting_has_a_limit() -> None:
    """Its own reading does not count as waiting: else it would never be answered."""
    core = core_of()
    progress_of(core, request())
    core._pace._seconds_per_cost = 1e9
    job = core.add(replace(request(ids=IDS[1:]), begin_within_s=60.0))
    while not any(isinstance(event, Finished) for _, event in core.step()):
        pass
    assert job.sequence.generated


def test_what_waits_for_another_s_reading_of_its_own_text_is_not_late() -> None:
    """A second question about a document got a 503 while the first one's pass read it."""
    core = core_of()
    first = core.add(request())
    core._pace._seconds_per_cost = 1e9
    core.step()
    assert not first.sequence.generated
    second = core.add(replace(request(), request_id="second", begin_within_s=20.0))
    second.added_s -= 100.0
    core._scheduler.schedule(1, is_decode_due=False)
    assert core._scheduler.is_led(second.sequence)
    core._looked_late_s = -math.inf  # the next step looks for late ones, while it is led
    ended = []
    while not second.sequence.generated:
        ended += [event for _, event in core.step() if isinstance(event, Finished)]
        assert all(event.late is None for event in ended)


def test_no_log_shows_a_prompt() -> None:
    """An exception in the engine's worker named the job, and with it all of the prompt's tokens."""
    core = core_of()
    job = core.add(request())
    for each in (job, job.request, job.sequence):
        assert str(IDS[1]) + ", " not in repr(each)
        assert len(repr(each)) < 200
    core.cancel(job)


def test_one_whose_leader_has_gone_is_late() -> None:
    """It counted as led for as long as nobody looked at it again, so its wait had no end."""
    core = core_of()
    first = core.add(request())
    core._pace._seconds_per_cost = 1e9
    core.step()
    led = core.add(replace(request(), request_id="second", begin_within_s=20.0))
    core._scheduler.schedule(1, is_decode_due=False)
    assert core._scheduler.is_led(led.sequence)
    core._scheduler._admission._max_running = 0  # from now on nobody is looked at
    core.cancel(first)
    led.added_s -= 100.0
    core._looked_late_s = -math.inf
    ended = [event for _, event in core.step() if isinstance(event, Finished)]
    assert [event.late for event in ended] == ["not_begun"]


def test_what_the_disk_brings_is_not_late() -> None:
    """A document that took longer to load than one may wait was never loaded, and never read."""
    core = core_of()
    job = core.add(replace(request(), begin_within_s=20.0))
    core._scheduler.schedule(1, is_decode_due=False)
    job.sequence.is_loading = True
    job.added_s -= 100.0
    core._looked_late_s = -math.inf
    assert core.step() == []
    job.sequence.is_loading = False
    core._looked_late_s = -math.inf
    while not job.sequence.generated:
        assert not any(isinstance(event, Finished) for _, event in core.step())


def test_it_is_asked_a_few_times_only_whether_others_read_for_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten times a second each that waits was compared with each that is read."""
    core = core_of(max_running=1)
    core.add(request(ids=IDS[::-1]))
    core.step()
    waits = core.add(replace(request(), request_id="second", begin_within_s=1000.0))
    waits.added_s -= 600.0
    asked = list[object]()
    monkeypatch.setattr(Scheduler, "is_led", lambda _, sequence: asked.append(sequence))
    for _ in range(3):
        core._looked_late_s = -math.inf
        core.step()
    assert asked == [waits.sequence]
