"""Groups of segments that another engine reads: the choice is the same, bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from gemserve.contract import filter_plan
from gemserve.contract.events import Event, Filtered, Finished, SegmentsRead, TextDelta
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve_fleet.replicas.segment_shares import GroupToRead, SegmentShare, request_for, share_of
from tests.model.test_segments import NAMES, answer, core_of, ids_of, request

TOKENS = 200_000  # of the KV memory
STEPS = 20_000


@pytest.fixture(autouse=True)
def _many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_plan, "GROUP_TOKENS", 800)


def planned(core: Core, ids: list[int], **fields: Any) -> Request:
    made = core.planner.planned(request(ids, **fields))
    assert made.plan is not None
    assert made.plan.segments is not None
    assert len(made.plan.segments.groups) >= 4
    return made


def lending(core: Core, ids: list[int], **fields: Any) -> Request:
    """A request that lends every other group."""
    made = planned(core, ids, **fields)
    assert made.plan is not None
    assert made.plan.segments is not None
    return replace(made, lent_groups=tuple(range(0, len(made.plan.segments.groups), 2)))


def read_group(core: Core, share: SegmentShare, group: GroupToRead) -> SegmentsRead:
    """What a peer with this core answers."""
    share, group = pickle.loads(pickle.dumps((share, group)))
    (last,) = core.run_alone(request_for(share, group, None))
    core.check_integrity()
    assert isinstance(last, Finished)
    assert last.segments_read is not None, last.error
    read: SegmentsRead = pickle.loads(pickle.dumps(last.segments_read))
    return read


def run_until_awaiting(core: Core, job: Job) -> None:
    for _ in range(STEPS):
        if job.sequence.is_awaiting:
            return
        core.step()
    raise AssertionError("it never waits")


def run_to_end(core: Core) -> tuple[FilterReport, tuple[int, ...]]:
    events: list[Event] = []
    for _ in range(STEPS):
        events += [event for _, event in core.step()]
        if core.is_idle:
            break
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length", events[-1].error
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    core.check_integrity()
    return report, tuple(t for e in events if isinstance(e, TextDelta) for t in e.token_ids)


def same(report: FilterReport, other: FilterReport) -> bool:
    assert report.scores is not None
    assert other.scores is not None
    return (report.selection, report.scores.tokens, report.coverage) == (
        other.selection,
        other.scores.tokens,
        other.coverage,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache_memory", [0.0, 0.5])
def test_the_choice_is_that_of_one_engine(name: str, cache_memory: float) -> None:
    """Groups arrive in another order, and one that was begun is not interrupted."""
    ids = ids_of(1, 4000)
    alone, drawn = answer(core_of(name, tokens=TOKENS, cache_memory=0.0), request(ids))
    owner, peer = (core_of(name, tokens=TOKENS, cache_memory=cache_memory) for _ in range(2))
    asked = lending(owner, ids)
    for is_cached in (False, True):
        job = owner.add(asked)
        lent = owner.lent_groups(job).numbers
        assert lent == asked.lent_groups
        share = share_of(asked, lent, 0)
        owner.step()
        for group in reversed(share.groups):
            owner.take_group(job, group.number, read_group(peer, share, group))
            owner.step()
            owner.check_integrity()
        report, tokens = run_to_end(owner)
        assert same(report, alone)
        assert tokens == drawn
        assert report.windows == alone.windows
        has_all = is_cached and cache_memory > 0 and owner.model.is_rope_fixed
        assert report.cached_windows == (report.windows if has_all else 0)
        assert report.cached_tokens == (4000 - 6 if has_all else 0)


def test_what_is_given_back_is_read_here() -> None:
    ids = ids_of(1, 4000)
    alone, drawn = answer(core_of(tokens=TOKENS), request(ids))
    owner = core_of(tokens=TOKENS)
    asked = lending(owner, ids)
    job = owner.add(asked)
    run_until_awaiting(owner, job)
    for number in asked.lent_groups:
        owner.take_group(job, number, None)
        owner.take_group(job, number, None)  # once more changes nothing
    report, tokens = run_to_end(owner)
    assert same(report, alone)
    assert tokens == drawn


def test_groups_that_are_cached_are_not_lent() -> None:
    owner, ids = core_of(tokens=TOKENS), ids_of(1, 4000)
    answer(owner, request(ids))
    job = owner.add(lending(owner, ids))
    assert owner.lent_groups(job).numbers == ()
    report, _ = run_to_end(owner)
    assert report.cached_windows == report.windows


def test_others_go_on_while_one_awaits_its_segments() -> None:
    owner, ids = core_of(tokens=TOKENS), ids_of(1, 4000)
    job = owner.add(lending(owner, ids))
    run_until_awaiting(owner, job)
    assert not owner.is_idle
    other = owner.add(planned(owner, ids_of(2, 4000)))
    ended: list[Any] = []
    for _ in range(STEPS):
        ended += [each for each, event in owner.step() if isinstance(event, Finished)]
        if ended:
            break
    assert ended == [other]
    assert [type(event) for _, event in owner.cancel(job)] == [Finished]
    owner.check_integrity()
    assert owner.kv_bytes_used == 0


def test_who_asks_the_same_waits_for_what_is_read_here_alone() -> None:
    """All choices of a request lend the same groups, and the others are read once."""
    owner, peer, ids = core_of(tokens=TOKENS), core_of(tokens=TOKENS), ids_of(1, 4000)
    asked = lending(owner, ids)
    jobs = [owner.add(replace(asked, request_id=f"r-{n}")) for n in range(2)]
    share = share_of(asked, asked.lent_groups, 0)
    for group in share.groups:
        read = read_group(peer, share, group)
        for job in jobs:
            owner.take_group(job, group.number, read)
    reports: list[FilterReport] = []
    for _ in range(STEPS):
        reports += [e.report for _, e in owner.step() if isinstance(e, Filtered)]
        if owner.is_idle:
            break
    first, second = reports
    assert same(first, second)
    assert first.cached_windows == 0
    assert second.cached_windows
    assert second.windows is not None
    num_lent = sum(len(group.segments) for group in share.groups)
    assert second.cached_windows == second.windows - num_lent
