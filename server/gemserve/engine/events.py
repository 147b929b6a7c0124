"""Makes events, which clients read, from the results of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gemserve.contract.events import (
    Event,
    Filtered,
    Finished,
    FinishReason,
    PromptScored,
    SegmentsRead,
    TextDelta,
)
from gemserve.contract.filter_plan import KeysRead, QueriesRead, SummaryArrays
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.scores import FilterScores
from gemserve.cost import ModelShape
from gemserve.engine.sequence.job import Emitted, Job
from gemserve.engine.sequence.step_plan import DrawnToken, Kept, RunOutput, StepOutput, StepPlan
from gemserve.filtering.message_report import report_messages
from gemserve.filtering.source_report import report_sources
from gemserve.kv_layout import KVLayout
from gemserve.ranges import as_ranges


class EventMaker:
    """Makes the events of one model's requests. A `Finished` event ends a request."""

    def __init__(self, shape: ModelShape, layout: KVLayout, eos_ids: frozenset[int]) -> None:
        self._shape, self._layout = shape, layout
        self._eos_ids = eos_ids

    def of_step(self, plan: StepPlan, out: RunOutput, jobs: Mapping[int, Job]) -> Emitted:
        """The events of a step, before the scheduler commits it. Each request's are in order."""
        emitted: Emitted = []
        now_s = time.monotonic()
        if plan.chunk is not None:
            job = jobs[plan.chunk.sequence]
            if job.started_s is None:
                job.started_s = out.started_s
                emitted += _made(job, out, partial(_of_first_step, job, out.started_s))
        for number, kept in out.kept.items():
            job = jobs[number]
            emitted += _made(job, out, partial(self._of_choice, job, kept, now_s))
        for number, logprobs in out.scored.items():
            emitted.append((jobs[number], PromptScored(logprobs)))
        for number, summaries in out.summarized.items():
            job = jobs[number]
            emitted += _made(job, out, partial(self._of_summaries, job, summaries))
        for number, vectors in out.vectors.items():
            job = jobs[number]
            emitted += _made(job, out, partial(self._of_vectors, job, vectors))
        for number in out.evicted:
            emitted += _made(jobs[number], out, partial(_of_eviction, jobs[number], now_s))
        for row in plan.decodes:
            jobs[row.sequence].num_proposed += len(row.proposed)
        for number, drawn in out.drawn.items():
            job = jobs[number]
            emitted += _made(job, out, partial(self._of_tokens, job, drawn, now_s))
        for number, error in out.failures.items():
            job = jobs[number]
            message, count = _message(error, job.request), len(job.sequence.generated)
            emitted.append((job, self.finished(job, "error", count, message)))
        return emitted

    def of_decided(self, job: Job) -> list[Event]:
        """All events of a request for a selection that needs no pass."""
        job.started_s = time.monotonic()
        try:
            filtered = _filtered(job, job.sequence.chosen, job.started_s, num_added=_num_added(job))
        except Exception as error:
            return [self.finished(job, "error", 0, _message(_described(error), job.request))]
        return [replace(filtered, ids=job.sequence.ids), self.finished(job, "stop", 0)]

    def finished(
        self, job: Job, reason: FinishReason, count: int, error: str | None = None
    ) -> Finished:
        """The last event of a request that has drawn `count` tokens."""
        unit = self._shape.unit_bytes
        is_generating = bool(job.sequence.generated)
        return Finished(
            reason=reason,
            completion_tokens=count,
            peak_kv_bytes=job.sequence.most_held * unit,
            decode_kv_bytes=job.sequence.kept_units(self._layout) * unit if is_generating else 0,
            error=error,
            stop=job.text.stopped_by,
            proposed_tokens=job.num_proposed,
            accepted_tokens=job.num_accepted,
            is_unread=job.started_s is None,
        )

    def _of_summaries(self, job: Job, summaries: tuple[SummaryArrays, ...]) -> list[Event]:
        read = _segments_read(job, summaries)
        return [replace(self.finished(job, "stop", 0), segments_read=read)]

    def _of_vectors(self, job: Job, vectors: KeysRead | QueriesRead) -> list[Event]:
        return [replace(self.finished(job, "stop", 0), vectors=vectors)]

    def _of_choice(self, job: Job, kept: Kept, now_s: float) -> list[Event]:
        """The report of what a filter pass chose. The job's `reason` is set if it chose more.

        It is the last event but one of a request for a selection.
        """
        if kept.has_failed:
            job.reason = "error"
        elif kept.is_diffuse:
            is_whole = len(kept.positions) == job.sequence.num_prompt
            job.reason = "diffuse_attention" if is_whole else "widened"
        filtered = _filtered(
            job,
            kept.positions,
            now_s,
            kept.coverage,
            kept.scores,
            num_added=len(kept.added),
            best=kept.best,
        )
        if job.request.selects_only:
            return [replace(filtered, ids=kept.ids), self.finished(job, "stop", 0)]
        return [filtered]

    def _of_tokens(self, job: Job, drawn: Sequence[DrawnToken], now_s: float) -> list[Event]:
        """The texts of a step's tokens. What was drawn behind the last one does not count."""
        events: list[Event] = []
        for index, token in enumerate(drawn):
            job.num_accepted += index > 0
            events += self._of_token(job, token, len(job.sequence.generated) + 1 + index, now_s)
            if isinstance(events[-1], Finished):
                break
        return events

    def _of_token(self, job: Job, drawn: DrawnToken, count: int, now_s: float) -> list[Event]:
        """The text of the `count`-th token, and the end of the request if it is the last one."""
        sampling, token = job.request.sampling, drawn.token
        reason: FinishReason | None = None
        text = ""
        # a grammar allows an end only after a whole answer, and then it may allow nothing else
        is_held = job.request.grammar is not None
        is_eos = token in self._eos_ids and (is_held or not sampling.ignore_eos)
        if is_eos or token in sampling.stop_token_ids:
            reason = "stop"
        else:
            text = job.text.push(token, may_stop=count >= sampling.min_tokens)
            if job.text.is_stopped or drawn.is_complete:
                reason = "stop"
            elif count == sampling.max_tokens:
                reason = "length"
        if reason is not None:
            text += job.text.flush()
            if job.text.is_stopped:
                reason = "stop"
        logprobs = () if drawn.logprob is None else (drawn.logprob,)
        delta = TextDelta(text=text, token_ids=(token,), drawn_s=now_s, logprobs=logprobs)
        return [delta] if reason is None else [delta, self.finished(job, reason, count)]


def _made(job: Job, out: RunOutput, make: Callable[[], list[Event]]) -> Emitted:
    """The events that `make` returns. If it fails, for example in the tokenizer, so does the job.

    It fails alone: the step has results of others, too. What has failed has no further events.
    """
    if job.sequence.order in out.failures:
        return []
    try:
        return [(job, event) for event in make()]
    except Exception as error:
        out.failures[job.sequence.order] = _described(error)
        return []


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _of_first_step(job: Job, started_s: float) -> list[Event]:
    """The report of a filter that has decided without a pass, in the first step of a prompt."""
    if job.sequence.is_read_from_cache:
        job.reason = "cached"
    if job.reason is None and job.sequence.chosen is None:
        return []
    return [_filtered(job, job.sequence.chosen, started_s, num_added=_num_added(job))]


def _num_added(job: Job) -> int:
    """Tokens that separate passages, of a choice that was made before the request came here."""
    return len(job.sequence.plan.added)


def step_output(out: RunOutput, emitted: Emitted) -> StepOutput:
    """What the scheduler needs to know about a step."""
    ended = {job.sequence.order for job, event in emitted if isinstance(event, Finished)}
    return StepOutput(
        is_chunk_done=out.is_chunk_done,
        taken_s=out.taken_s,
        tokens={number: [each.token for each in drawn] for number, drawn in out.drawn.items()},
        kept=out.kept,
        finished=frozenset(ended - set(out.failures)),
        failures=frozenset(out.failures),
    )


def _of_eviction(job: Job, now_s: float) -> list[Event]:
    return [_filtered(job, None, now_s)]


def _filtered(
    job: Job,
    kept: Sequence[int] | None,
    now_s: float,
    coverage: float | None = None,
    scores: FilterScores | None = None,
    num_added: int = 0,
    best: Sequence[tuple[int, int]] = (),
) -> Filtered:
    """The filter's report.

    `kept` None: all positions are kept, or each layer keeps different ones.
    """
    params, sequence = job.request.filter, job.sequence
    assert job.started_s is not None, "a filter has decided before the first step"
    layer, segments = sequence.filter_layer, sequence.segment_pass
    if sequence.is_read_from_cache:
        layer = segments = None
    selection = None
    if params.return_selection and not sequence.evicts:
        selection = ((0, sequence.num_prompt),) if kept is None else as_ranges(kept)
    is_untold = sequence.evicts and bool(job.request.excerpts)
    report = FilterReport(
        method=params.method,
        applied=job.reason in (None, "widened"),
        reason=job.reason,
        layer=layer,
        prompt_tokens=sequence.num_prompt,
        kept_tokens=sequence.num_kept if kept is None else len(kept),
        protected_tokens=sequence.plan.budget.protected,
        added_tokens=num_added,
        cached_tokens=sequence.num_cached + sequence.num_reused,
        filter_ms=0.0 if layer is None else (now_s - job.started_s) * 1e3,
        selection=selection,
        first_difference=job.request.first_difference,
        messages=None if sequence.evicts else report_messages(sequence.request, kept),
        coverage=coverage,
        coverage_bound=None if coverage is None else sequence.plan.coverage_bound,
        window=None if segments is None else segments.plan.size,
        windows=None if segments is None else len(segments.plan.segments),
        cached_windows=None if segments is None else segments.num_cached,
        searched=job.request.searched,
        sources=None if is_untold else report_sources(job.request, kept, best),
        found=_is_found(job, coverage),
        scores=scores,
    )
    return Filtered(report=report, started_s=job.started_s, filtered_s=now_s)


def _is_found(job: Job, coverage: float | None) -> bool | None:
    """Does what a library has answer the question, as far as coverage can say?"""
    searched = job.request.searched
    if searched is not None and not searched.read:
        return False
    if coverage is None or searched is None:
        return None
    return coverage >= job.sequence.plan.coverage_bound


def _segments_read(job: Job, summaries: tuple[SummaryArrays, ...]) -> SegmentsRead:
    sequence = job.sequence
    assert sequence.segment_pass is not None
    return SegmentsRead(
        summaries=summaries,
        num_cached=sequence.segment_pass.num_cached,
        cached_tokens=sequence.num_cached,
    )


def _message(error: str, request: Request) -> str:
    """What went wrong. It names the adapter, because its numbers may be the cause."""
    adapter = request.adapter
    used = "" if adapter is None else f" (with adapter {adapter.name}, version {adapter.version})"
    return f"{error}{used}"
