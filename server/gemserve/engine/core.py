"""The engine without threads: requests in, events out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

from gemserve.calibration import Calibration
from gemserve.config import DEFAULT_KEEP, EngineConfig
from gemserve.decoding.detokenize import TextStream
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.sampling import Draw, SamplerState
from gemserve.engine.memory import MemoryPool
from gemserve.engine.pace import Pace
from gemserve.engine.runner import Runner, RunOutput
from gemserve.engine.scheduler import Chunk, Plan, Scheduler, StepOutput
from gemserve.engine.sequence import Sequence, State
from gemserve.errors import CapacityExceeded
from gemserve.filter_plan import FilterPlan
from gemserve.filtering.plan import FilterPlanner
from gemserve.filtering.selector import Choice
from gemserve.model.causal import CausalModel
from gemserve.types import (
    Event,
    Filtered,
    FilterReason,
    FilterReport,
    Finished,
    FinishReason,
    PromptScored,
    Request,
    TextDelta,
)


@dataclass(slots=True, eq=False)
class Job:
    """A request being served: its place in the schedule, its draws, its text.

    `reason`: why its prompt is not filtered, or widely. `started_s`: of its first step.
    """

    request: Request
    sequence: Sequence
    sampler: SamplerState
    text: TextStream
    reason: FilterReason | None
    started_s: float | None = None


Emitted = list[tuple[Job, Event]]


class Core:
    """Scheduler, runner and text put together. Used by one thread at a time."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Any,
        config: EngineConfig,
        eos_ids: frozenset[int],
        calibration: Calibration | None = None,
    ) -> None:
        """`calibration` None: filter passes end at the layer in `config`."""
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.eos_ids = eos_ids
        self.calibration = calibration or Calibration(layer=config.filter_layer or 0)
        self.grammars = Grammars(tokenizer, vocab_size=model.vocab_size, end_ids=eos_ids)
        num_units = config.kv_memory_bytes // model.shape.unit_bytes
        self._pool = MemoryPool(num_units)
        self._runner = Runner(model, num_units, config.cuda_graphs)
        self._scheduler = Scheduler(
            self._pool,
            num_layers=model.num_layers,
            max_running=config.max_running,
        )
        self._pace = Pace(target_s=config.step_target_s)
        self._jobs: dict[Sequence, Job] = {}
        self._decided: list[Job] = []  # whose choice is all that was asked for, and needs no pass
        self._num_added = 0
        self.planner = FilterPlanner(
            method=config.filter_method,
            keep=DEFAULT_KEEP if config.filter_keep is None else config.filter_keep,
            min_tokens=config.filter_min_tokens,
            fails_open=config.filter_on_error == "full",
            calibration=self.calibration,
            sliding_windows=model.sliding_windows,
            context_tokens=model.context_tokens,
            longest_sequence=self.longest_sequence,
        )

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are recorded and replayed."""
        return self._runner.has_graphs

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and completion, that fits if read whole."""
        held = self._pool.capacity // (2 * self.model.num_layers)
        return min(held, self.model.context_tokens)

    @property
    def kv_usage_ratio(self) -> float:
        return self._pool.used / self._pool.capacity

    @property
    def kv_bytes_used(self) -> int:
        return self._pool.used * self.model.shape.unit_bytes

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle and not self._decided

    def step(self) -> Emitted:
        """A token of every decoding sequence, or a slice of an unfinished prompt."""
        if self._decided:
            return self._tell_decided()
        is_decoding, pace = self._is_decoding, self._pace
        piece_cost = pace.piece_cost(is_decoding)
        plan = self._scheduler.schedule(
            self._chunk_tokens(piece_cost), is_decode_due=pace.is_decode_due()
        )
        out = self._runner.run(
            plan,
            {s: job.sampler for s, job in self._jobs.items()},
            slice_s=pace.slice_s(is_decoding),
            piece=int(piece_cost / self.model.shape.pair()),
        )
        emitted = self._speak(plan, out)
        self._scheduler.commit(plan, _outcome(out, emitted))
        if plan.decodes:
            pace.observe_decode(out.taken_s)
        if plan.chunk is not None:
            pace.observe_slice(out.taken_s)
            if out.pass_s:
                pace.observe_pass(out.pass_s, self._cost(plan.chunk))
        self._forget_finished(emitted)
        return emitted

    def plan(self, request: Request) -> FilterPlan:
        """How a request will be filtered; any thread may ask.

        Raises `CapacityExceeded` if the request could not run even alone, and `RequestError` if its
        filter method is not for this model.
        """
        plan = self.planner.plan(request)
        sequence = Sequence(request=request, plan=plan, order=0)
        if not self._scheduler.fits_ever(sequence):
            unit = self.model.shape.unit_bytes
            raise CapacityExceeded(
                tokens=sequence.num_prompt,
                kept=sequence.num_kept,
                max_tokens=request.sampling.max_tokens,
                needed_bytes=sequence.peak_units(self.model.num_layers) * unit,
                limit_bytes=self._pool.capacity * unit,
            )
        return plan

    def add(self, request: Request, plan: FilterPlan | None = None) -> Job:
        """Queue a request by its plan. Raises what `plan` raises, and `InvalidGrammar`."""
        plan = plan or self.plan(request)
        self._num_added += 1
        sequence = Sequence(request=request, plan=plan, order=self._num_added)
        grammar = request.grammar
        matcher = self.grammars.matcher(grammar) if grammar is not None else None
        job = Job(
            request=request,
            sequence=sequence,
            sampler=SamplerState(request.sampling, request.prompt_ids, self.eos_ids, matcher),
            text=TextStream(self.tokenizer, request.sampling.stop),
            reason=plan.reason,
        )
        self._jobs[sequence] = job
        if request.selects_only and sequence.filter_layer is None:
            self._decided.append(job)
        else:
            self._scheduler.add(sequence)
        return job

    def cancel(self, job: Job) -> Emitted:
        """End a request at once and free its memory. Idempotent."""
        if job.sequence not in self._jobs:
            return []
        if job in self._decided:
            self._decided.remove(job)
        else:
            self._scheduler.finish(job.sequence)
        emitted: Emitted = [(job, self._finished(job, "abort", len(job.sequence.generated)))]
        self._forget_finished(emitted)
        return emitted

    def run_alone(self, request: Request) -> Iterator[Event]:
        """All events of one request, with nothing else running: for commands without a server."""
        assert self.is_idle
        self.add(request)
        while not self.is_idle:
            for _, event in self.step():
                yield event

    def check_integrity(self) -> None:
        """Prove that states and memory agree. Raises `AssertionError`."""
        self._scheduler.check_integrity()
        decided = [job.sequence for job in self._decided]
        assert set(self._jobs) == {*self._scheduler.running, *self._scheduler.waiting, *decided}

    def _tell_decided(self) -> Emitted:
        emitted: Emitted = []
        for job in self._decided:
            job.started_s = time.monotonic()
            emitted.append((job, self._filtered(job, job.sequence.chosen, job.started_s)))
            emitted.append((job, self._finished(job, "stop", 0)))
        self._decided = []
        self._forget_finished(emitted)
        return emitted

    @property
    def _is_decoding(self) -> bool:
        return any(s.state is State.DECODING for s in self._scheduler.running)

    def _speak(self, plan: Plan, out: RunOutput) -> Emitted:
        """Turn a step's results into events; a terminal event ends its request."""
        emitted: Emitted = []
        now = time.monotonic()
        if plan.chunk is not None:
            job = self._jobs[plan.chunk.sequence]
            if job.started_s is None:
                job.started_s = out.started_s
                if job.reason is not None or job.sequence.chosen is not None:
                    emitted.append((job, self._filtered(job, job.sequence.chosen, out.started_s)))
        for sequence, choice in out.chosen.items():
            job = self._jobs[sequence]
            emitted.append((job, self._chosen(job, choice, now)))
            if job.request.selects_only:
                emitted.append((job, self._finished(job, "stop", 0)))
        for sequence, logprobs in out.scored.items():
            emitted.append((self._jobs[sequence], PromptScored(logprobs)))
        for sequence in out.evicted:
            emitted.append((self._jobs[sequence], self._filtered(self._jobs[sequence], None, now)))
        for sequence, drawn in out.draws.items():
            job = self._jobs[sequence]
            emitted += [(job, event) for event in self._say(job, drawn, now)]
        for sequence, error in out.failures.items():
            job = self._jobs[sequence]
            message = f"{type(error).__name__}: {error}"
            count = len(sequence.generated)
            emitted.append((job, self._finished(job, "error", count, message)))
        return emitted

    def _say(self, job: Job, drawn: Draw, now: float) -> Iterator[Event]:
        """One token's text, and the end if this was it."""
        sampling, token, matcher = job.request.sampling, drawn.token, job.sampler.matcher
        count = len(job.sequence.generated) + 1
        reason: FinishReason | None = None
        text = ""
        # a grammar allows it only where the answer is whole, and may then allow nothing else
        is_eos = token in self.eos_ids and (matcher is not None or not sampling.ignore_eos)
        if is_eos or token in sampling.stop_token_ids:
            reason = "stop"
        else:
            text = job.text.push(token, may_stop=count >= sampling.min_tokens)
            if job.text.is_stopped or (matcher is not None and matcher.is_complete):
                reason = "stop"
            elif count == sampling.max_tokens:
                reason = "length"
        if reason is not None:
            text += job.text.flush()
            if job.text.is_stopped:
                reason = "stop"
        logprobs = () if drawn.logprob is None else (drawn.logprob,)
        yield TextDelta(text=text, token_ids=(token,), drawn_s=now, logprobs=logprobs)
        if reason is not None:
            yield self._finished(job, reason, count)

    def _chosen(self, job: Job, choice: Choice, now: float) -> Filtered:
        """What a filter pass has found."""
        kept = choice.positions.tolist()
        if choice.has_failed:
            job.reason = "error"
        elif choice.is_diffuse:
            is_whole = len(kept) == job.sequence.num_prompt
            job.reason = "diffuse_attention" if is_whole else "widened"
        return self._filtered(job, kept, now, choice.coverage)

    def _filtered(
        self, job: Job, kept: Ids[int] | None, now: float, coverage: float | None = None
    ) -> Filtered:
        """`kept` None: everything, or what cannot be told token by token."""
        params, sequence = job.request.filter, job.sequence
        assert job.started_s is not None
        selection = None
        if params.return_selection and not sequence.evicts:
            selection = ((0, sequence.num_prompt),) if kept is None else as_ranges(kept)
        report = FilterReport(
            method=params.method,
            applied=job.reason in (None, "widened"),
            reason=job.reason,
            layer=sequence.filter_layer,
            prompt_tokens=sequence.num_prompt,
            kept_tokens=sequence.num_kept if kept is None else len(kept),
            cached_tokens=0,
            filter_ms=(now - job.started_s) * 1e3 if sequence.filter_layer is not None else 0.0,
            selection=selection,
            coverage=coverage,
        )
        return Filtered(report=report, started_s=job.started_s, filtered_s=now)

    def _finished(
        self, job: Job, reason: FinishReason, count: int, error: str | None = None
    ) -> Finished:
        unit, layers = self.model.shape.unit_bytes, self.model.num_layers
        is_generating = bool(job.sequence.generated)
        return Finished(
            reason=reason,
            completion_tokens=count,
            peak_kv_bytes=job.sequence.most_held * unit,
            decode_kv_bytes=job.sequence.kept_units(layers) * unit if is_generating else 0,
            error=error,
        )

    def _forget_finished(self, emitted: Emitted) -> None:
        for job, event in emitted:
            if isinstance(event, Finished):
                del self._jobs[job.sequence]
                self._runner.forget(job.sequence)

    def _chunk_tokens(self, piece_cost: float) -> int:
        """As many as a layer's matrices can take in one piece; attention is cut in pieces."""
        fitting = int(piece_cost / self.model.shape.layer(0, 1))
        low, high = self.config.min_chunk_tokens, self.config.max_chunk_tokens
        return max(low, min(high, fitting))

    def _cost(self, chunk: Chunk) -> float:
        """Of a chunk's pass, as many layers as it has."""
        shape, layer = self.model.shape, chunk.sequence.filter_layer
        if chunk.is_filter and layer is not None:
            return shape.filter_chunk(chunk.start, chunk.count, layer)
        return shape.prefill_chunk(chunk.start, chunk.count)


def _outcome(out: RunOutput, emitted: Emitted) -> StepOutput:
    ended = {job.sequence for job, event in emitted if isinstance(event, Finished)}
    return StepOutput(
        is_chunk_done=out.is_chunk_done,
        tokens={sequence: drawn.token for sequence, drawn in out.draws.items()},
        kept={sequence: choice.positions.tolist() for sequence, choice in out.chosen.items()},
        finished=frozenset(ended - set(out.failures)),
        failures=frozenset(out.failures),
    )


def as_ranges(positions: Ids[int]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)
