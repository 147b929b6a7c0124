"""What the core does with requests whose first token would come too late."""

from __future__ import annotations

import time
from dataclasses import replace

from gemserve.contract.events import Finished
from tests.model.test_progress import IDS, core_of, progress_of, request


def test_what_would_come_too_late_is_not_begun() -> None:
    """It was read all the same, so that under overload most answers came too late."""
    core = core_of(max_running=1)
    progress_of(core, request())  # measures how fast a pass is
    now_s = time.monotonic()
    first = core.add(request(ids=IDS[::-1]))
    passed = core.add(replace(request(), request_id="passed", first_token_by_s=now_s - 1))
    waits = core.add(replace(request(), request_id="waits", first_token_by_s=now_s + 1000))
    ((job, end),) = core.step()
    assert job is passed
    assert isinstance(end, Finished)
    assert (end.reason, end.is_late, end.completion_tokens) == ("error", True, 0)
    core.step()
    core.cancel(first)
    assert core.progress(waits) is not None
    core.cancel(waits)
    core.check_integrity()
    hurried = replace(request(ids=IDS[1:]), first_token_by_s=time.monotonic() + 1e-4)
    core.add(hurried)
    core._pace._seconds_per_cost = 1.0  # so slow that reading alone takes too long
    events = [event for _ in range(3) for _, event in core.step()]
    assert [event.is_late for event in events if isinstance(event, Finished)] == [True]
    assert core.is_idle
    core.check_integrity()


def test_what_has_begun_is_not_late() -> None:
    core = core_of()
    job = core.add(replace(request(), first_token_by_s=time.monotonic() + 60))
    core.step()
    assert job.started_s is not None
    core._pace._seconds_per_cost = 1e9
    while not any(isinstance(event, Finished) for _, event in core.step()):
        pass
    assert job.sequence.generated
