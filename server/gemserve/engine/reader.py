"""Two models in one engine: a small one, the reader, looks at prompts, and the large one answers.

A request first runs in the reader's core, which ends when its filter has chosen. What was chosen
then goes through all layers of the model that answers. If the reader distrusts its choice, and all
would have to be read, that model first looks itself. Both cores belong to one worker thread and
step in turn: prompts that either of them reads share the time between two decode steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemserve.contract.events import Event, Filtered, Finished, LentGroups, SegmentsRead
from gemserve.contract.prompt_parts import StandsFor
from gemserve.contract.requests import Request
from gemserve.engine.cache.state import StoredDocument
from gemserve.engine.core import Core
from gemserve.engine.scheduling.pace import Crowd, StepLimits
from gemserve.engine.sequence.job import Job
from gemserve.engine.sequence.progress import Progress
from gemserve.engine.sequence.step_plan import Kept, RunOutput, StepPlan
from gemserve.errors import CapacityExceeded, RequestError
from gemserve.filtering.reader_choice import with_choice
from gemserve.filtering.reading_plans import ReaderPlans, Translate


class ReaderCore(Core):
    """The core of a model that reads prompts, and answers none.

    `choices`: what was chosen for requests that have just ended. `crowd_of_both`: who shares the
    time in both cores; the pace counts what both read.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.choices: dict[Job, Kept] = {}
        self.crowd_of_both: Callable[[], Crowd] = super()._crowd

    @property
    def num_unread(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    @property
    def must_wait(self) -> bool:
        """Do streams of the model that answers get their next token before this one reads on?"""
        crowd = self._crowd()
        return bool(crowd.decoding) and self._pace.is_decode_due(crowd)

    def note_decode(self, seconds: float) -> None:
        """Note that a decode step of the model that answers took `seconds`."""
        self._pace.observe_decode(seconds)

    def note_slice(self, seconds: float) -> None:
        """Note that the model that answers read a prompt for `seconds`."""
        self._pace.observe_slice(seconds)

    def _crowd(self) -> Crowd:
        return self.crowd_of_both()

    def _portion(self) -> None:
        """There is none: the portions that are known are of the other core's loads."""

    def _note_choices(self, out: RunOutput) -> None:
        for number, kept in out.kept.items():
            if number in self._jobs:
                self.choices[self._jobs[number]] = kept


@dataclass(slots=True, eq=False, repr=False)
class ReadJob:
    """A request that the reader looks at first.

    `answer` None: the reader has not ended yet. `filtered`: the reader's report, if its tokens are
    not those of the model that answers, which then makes a report in its own tokens, or if it
    distrusts its choice.
    """

    request: Request
    reading: Job
    answer: Job | None = None
    filtered: Filtered | None = None

    @property
    def is_looked_at_anew(self) -> bool:
        """Does the model that answers look at the prompt itself, after the reader?"""
        return self.answer is not None and self.answer.request.filter.reader == "self"

    @property
    def stands_for(self) -> StandsFor | None:
        return self.reading.request.stands_for


class CoreWithReader(Core):
    """The core of a model that answers, with another one that reads for it."""

    def __init__(
        self,
        reader: ReaderCore,
        translate: Translate | None,
        **settings: Any,
    ) -> None:
        """`translate`: see `ReaderPlans`."""
        super().__init__(**settings)
        self.reader = reader
        reader.crowd_of_both = self._crowd
        longest = max(self.planner.longest_prompt, reader.planner.longest_prompt)
        self.config = replace(self.config, max_prompt_tokens=longest)
        plans = ReaderPlans.of(reader.planner, self.planner, translate)
        self.planner = replace(self.planner, reader=plans, longest_prompt=longest)
        self._readings: dict[Job, ReadJob | None] = {}  # None: it ends in the reader
        self._answers: dict[Job, ReadJob] = {}
        self._is_readers_turn = False

    @property
    def reads_with(self) -> Core:
        return self if self.planner.of_documents is self.planner else self.reader

    @property
    def num_running(self) -> int:
        return super().num_running + self.reader.num_running

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + self.reader.num_waiting

    @property
    def waiting_of(self) -> Mapping[bytes, int]:
        return Counter(super().waiting_of) + Counter(self.reader.waiting_of)

    @property
    def internal_errors(self) -> Mapping[str, int]:
        return Counter(super().internal_errors) + Counter(self.reader.internal_errors)

    @property
    def stored_documents(self) -> Mapping[str, StoredDocument]:
        """What both have. The tokens are those of the one that has more."""
        own, others = super().stored_documents, self.reader.stored_documents
        return {**own, **others} | {i: _merged(own[i], others[i]) for i in own if i in others}

    @property
    def kv_usage_ratio(self) -> float:
        return self.kv_bytes_used / (
            self.config.kv_memory_bytes + self.reader.config.kv_memory_bytes
        )

    @property
    def kv_bytes_used(self) -> int:
        return super().kv_bytes_used + self.reader.kv_bytes_used

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self.reader.is_idle

    def check(self, request: Request) -> None:
        reading = _reading_of(request)
        if reading is not None:
            self._check_reading(reading)
        if reading is not request:
            super().check(request)

    def _check_reading(self, reading: Request) -> None:
        try:
            self.reader.check(reading)
        except CapacityExceeded as error:
            raise RequestError(
                f"For the reader: {error.counts} (--reader-memory). With filter.reader=self the "
                "model itself looks.",
                param="filter.reader",
                code=error.code,
            ) from error

    def add(self, request: Request) -> Any:
        if request.plan is None:
            request = self.planner.planned(request)
            self.check(request)
        reading = _reading_of(request)
        if reading is None:
            return super().add(request)
        job = self.reader.add(reading)
        ends_there = request.selects_only and reading.stands_for is None
        ends_there = ends_there or reading is request
        self._readings[job] = None if ends_there else ReadJob(request, job)
        return self._readings[job] or job

    def step(self) -> list[tuple[Any, Event]]:
        """One step of one of the two: of the reader in its turn, if no stream must wait for it."""
        emitted: list[tuple[Any, Event]]
        if self._is_reader_next():
            started_s = time.monotonic()
            emitted = [e for job, event in self.reader.step() for e in self._of_reader(job, event)]
            self._pace.observe_slice(time.monotonic() - started_s)
            return emitted
        emitted = []
        for job, event in super().step():
            read = self._answers.get(job)
            if read is not None and isinstance(event, Filtered):
                if read.filtered is None:
                    continue  # the reader's report has come
                with_report = _with_both_passes if read.is_looked_at_anew else _with_report
                event = with_report(event, read.filtered)
            elif isinstance(event, Filtered) and event.report.layer is not None:
                event = replace(event, report=replace(event.report, reader="self"))
            emitted.append((job if read is None else read, event))
            if isinstance(event, Finished):
                self._answers.pop(job, None)
        return emitted

    def cancel(self, job: Any) -> list[tuple[Any, Event]]:
        of_core = job
        if isinstance(job, ReadJob):
            of_core = job.reading if job.answer is None else job.answer
        is_reading = of_core in self._readings
        self._readings.pop(of_core, None)
        self._answers.pop(of_core, None)
        emitted = self.reader.cancel(of_core) if is_reading else super().cancel(of_core)
        has_read = isinstance(job, ReadJob) and job.answer is not None
        return [(job, _read(event) if has_read else event) for _, event in emitted]

    def progress(self, job: Any) -> Progress | None:
        if isinstance(job, ReadJob) and job.answer is not None:
            return super().progress(job.answer)
        if isinstance(job, ReadJob):
            return self.reader.progress(job.reading)
        return self.reader.progress(job) if job in self._readings else super().progress(job)

    def forget_documents(self, ids: Collection[str]) -> None:
        super().forget_documents(ids)
        self.reader.forget_documents(ids)

    def lent_groups(self, job: Any) -> LentGroups:
        return LentGroups()  # engines that read for each other have no readers

    def take_group(self, job: Any, group: int, read: SegmentsRead | None) -> None:
        raise AssertionError("engines that read for each other have no readers")

    def close(self) -> None:
        super().close()
        self.reader.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.reader.check_integrity()

    def _is_reader_next(self) -> bool:
        if self.reader.is_idle:
            return False
        # what this one does while nobody asks, such as reading in idle time, waits
        if super().is_idle or (self.reader.num_unread and not super()._has_requests):
            return True
        if self.reader.must_wait:
            return False
        own = super()._crowd()
        if own.decoding and not own.unread:
            return True  # until a stream must get its next token
        self._is_readers_turn = not self._is_readers_turn
        return self._is_readers_turn

    def _crowd(self) -> Crowd:
        crowd = super()._crowd()
        return replace(crowd, unread=crowd.unread + self.reader.num_unread)

    def _of_reader(self, job: Job, event: Event) -> list[tuple[Any, Event]]:
        """What becomes of an event of the reader."""
        read = self._readings[job]
        if isinstance(event, Filtered):
            event = replace(event, report=replace(event.report, reader="reader"))
            is_distrusted = event.report.reason == "diffuse_attention"
            if read is not None and (is_distrusted or read.stands_for is not None):
                read.filtered = event
                return []
        if not isinstance(event, Finished):
            return [(read or job, event)]
        del self._readings[job]
        kept = self.reader.choices.pop(job, None)
        if read is None or kept is None or event.reason == "error":  # it wanted no more, or failed
            return [(read or job, event)]
        reports: list[tuple[Any, Event]] = []
        try:
            request = self._looking_itself(read)
            if request is None and read.stands_for is None and read.filtered is not None:
                reports, read.filtered = [(read, read.filtered)], None
            read.answer = super().add(request or _with_choice(read, kept))
        except Exception as error:  # this request's; the others go on
            message = f"{type(error).__name__}: {error}"
            return [*reports, (read, Finished(reason="error", completion_tokens=0, error=message))]
        self._answers[read.answer] = read
        return reports

    def _looking_itself(self, read: ReadJob) -> Request | None:
        """What the model that answers chooses from itself, as the reader distrusts its choice."""
        if read.filtered is None or read.filtered.report.reason != "diffuse_attention":
            return None
        if read.request.selects_only:
            return None
        try:
            request = self.planner.looking_itself(read.request)
            if request is None:
                return None
            super().check(request)
        except RequestError:  # what it cannot look at, such as for lack of memory, is read whole
            return None
        return replace(request, begin_within_s=math.inf)

    def _observe(self, plan: StepPlan, out: RunOutput, limits: StepLimits) -> None:
        super()._observe(plan, out, limits)
        if plan.decodes:
            self.reader.note_decode(out.taken_s)
        if plan.chunk is not None:
            self.reader.note_slice(out.taken_s)


def _read(event: Event) -> Event:
    """The event of a request whose prompt the reader has read."""
    return replace(event, is_unread=False, late=None) if isinstance(event, Finished) else event


def _merged(one: StoredDocument, other: StoredDocument) -> StoredDocument:
    return StoredDocument(
        units=one.units + other.units,
        num_tokens=max(one.num_tokens, other.num_tokens),
        is_pinned=one.is_pinned or other.is_pinned,
    )


def _reading_of(request: Request) -> Request | None:
    """What the reader does for a request; None: nothing."""
    if request.filter.reader == "reader" and (request.vectors_only or request.summarizes_only):
        return request
    # it was made where requests are built, which do not know yet whose they are
    return request.reading and replace(
        request.reading,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        documents=request.documents,
        pin=request.pin,
        first_difference=request.first_difference,
        priority=request.priority,
        notes=request.notes,
        begin_within_s=request.begin_within_s,
    )


def _with_choice(read: ReadJob, kept: Kept) -> Request:
    """The request with what the reader has chosen for it."""
    request, plan = replace(read.request, reading=None, begin_within_s=math.inf), read.request.plan
    assert plan is not None
    is_all = len(kept.positions) == len(read.reading.request.prompt_ids)
    # what is all for a reader with other tokens may be too much here
    is_fitting = read.stands_for is None or len(request.prompt_ids) <= plan.budget.limit
    if is_all and (is_fitting or kept.has_failed):
        reason = None if read.filtered is None else read.filtered.report.reason
        whole = plan.having(reason=reason, num_kept=len(request.prompt_ids))
        return replace(request, plan=whole)
    if read.stands_for is not None:
        best = kept.best or [(position, position + 1) for position in kept.positions]
        is_widened = kept.is_diffuse or is_all
        plan = with_choice(request, plan, best, read.stands_for, is_widened=is_widened)
        return replace(request, plan=plan)
    plan = plan.having(
        num_kept=len(kept.ids),
        chosen=tuple(kept.positions),
        joined=tuple(kept.ids),
        added=tuple(kept.added),
    )
    return replace(request, plan=plan)


def _with_both_passes(event: Filtered, of_reader: Filtered) -> Filtered:
    """The report of the model that looked after its reader, with the time of both passes."""
    seen = event.report
    report = replace(
        seen,
        reader="reader" if seen.layer is None else "self",  # it may be read whole from the cache
        filter_ms=seen.filter_ms + of_reader.report.filter_ms,
    )
    return replace(event, report=report, started_s=of_reader.started_s)


def _with_report(event: Filtered, of_reader: Filtered) -> Filtered:
    """A report in the answering model's tokens, with what the reader's says of its own pass."""
    seen = of_reader.report
    report = replace(
        event.report,
        reader="reader",
        reason=seen.reason,
        applied=seen.applied,
        layer=seen.layer,
        coverage=seen.coverage,
        coverage_bound=seen.coverage_bound,
        window=seen.window,
        windows=seen.windows,
        cached_windows=seen.cached_windows,
        filter_ms=seen.filter_ms,
        found=seen.found,
    )
    return replace(
        event, report=report, started_s=of_reader.started_s, filtered_s=of_reader.filtered_s
    )
