"""The engine without threads: requests go in and events come out, one step at a time."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from gemserve.calibration.files import Calibration
from gemserve.config import ResolvedEngineConfig
from gemserve.contract.adapters import AdapterName
from gemserve.contract.events import Event, Finished, LentGroups, SegmentsRead
from gemserve.contract.requests import Request
from gemserve.contract.scores import MOST_ANSWER_TOKENS, AnswerAttention
from gemserve.decoding.detokenize import TextStream, token_offsets
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.markers import NO_MARKERS, shown_markers
from gemserve.engine.cache.state import CacheCounts, CacheState, StoredDocument
from gemserve.engine.events import EventMaker, step_output
from gemserve.engine.memory import Change, MemoryPool
from gemserve.engine.reuse.disk import HostCopies, state_of
from gemserve.engine.reuse.disk_setup import open_disk_cache
from gemserve.engine.reuse.idle_reading import IdleReading
from gemserve.engine.reuse.lookup import check_pin
from gemserve.engine.reuse.segments import lend_groups
from gemserve.engine.running.runner import Runner
from gemserve.engine.scheduling.pace import Crowd, Pace, StepLimits
from gemserve.engine.scheduling.prompt_lookup import PromptLookup
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.scheduling.time_shares import Portion, Presence, loads_of
from gemserve.engine.sequence.job import Emitted, Job
from gemserve.engine.sequence.progress import Progress, find_progress
from gemserve.engine.sequence.sequence import LAST, LiveSequence, State, check_capacity
from gemserve.engine.sequence.step_plan import RunOutput, StepPlan, Task
from gemserve.engine.sequence.text_index import TextIndex
from gemserve.errors import CapacityExceeded, ConfigError, RequestError
from gemserve.filtering.planner import FilterPlanner
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel

log = logging.getLogger("gemserve.engine")
_DISK_WAIT_S = 0.02  # most that a step waits for the disk if there is nothing else to do
_LAST_OF_PROMPT = 8  # tokens, more than one character has
_LATE_PERIOD_S = 0.1  # how often those that have waited too long are looked for
_TIMES_ASKED = 8  # within the time that one may wait, whether another's pass reads for it
_LENT_WAIT_S = 0.005  # that it waits for what other engines read
# what `internal_errors` counts besides the disk's: batches that were tried one by one, answers
# without the attention that was asked for, and prompts that are read whole because a filter failed
_CAUGHT = ("decode_batch", "draw_batch", "answer_attention", "filter_pass")
_LOG_EVERY_S = 60.0  # at most one line in this time about errors of one kind


class StepRunner(Protocol):
    """What the core needs of a runner: see `Runner`. All arguments and results can be pickled."""

    @property
    def has_graphs(self) -> bool: ...
    @property
    def copies(self) -> HostCopies: ...
    def begin(self, task: Task, adapter: Adapter) -> None: ...
    def run(self, plan: StepPlan, limits: StepLimits) -> RunOutput: ...
    def watched_answer(self, number: int, offsets: Sequence[int]) -> AnswerAttention | None: ...
    def forget(self, numbers: Collection[int]) -> None: ...
    def change_memory(self, changes: Collection[Change]) -> None: ...


class Core:
    """Scheduler, runner and events together. Only one thread at a time may use it.

    Any thread may call `check` and read the attributes without an underscore, which never change,
    but for what `filter_by` sets. The properties are for the thread that steps.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Any,
        config: ResolvedEngineConfig,
        eos_ids: frozenset[int],
        calibration: Calibration | None = None,
        new_runner: Callable[..., StepRunner] = Runner,
    ) -> None:
        """`calibration` None: filter passes end at the layer in `config`.

        `new_runner` takes what `Runner` takes.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.eos_ids = eos_ids
        self.calibration = calibration or Calibration(layer=config.filter_layer)
        self.grammars = Grammars(tokenizer, vocab_size=model.vocab_size, end_ids=eos_ids)
        self.num_units = config.kv_memory_bytes // model.shape.unit_bytes
        if self.num_units < 1:
            raise ConfigError(
                f"kv_memory={config.kv_memory_bytes}: must be at least {model.shape.unit_bytes}, "
                "the bytes of one token's keys in one layer"
            )
        cache_units = int(config.cache_memory * self.num_units)
        if not model.has_reusable_beginnings:
            cache_units = 0
        self._layout = model.shape.kv_layout(saves=cache_units > 0)
        # the longest sequence, prompt and completion, that fits if it is read whole
        self.longest_sequence = self._layout.longest(self.num_units, model.context_tokens)
        self.filter_by(config, self.calibration)
        self._pool = MemoryPool(self.num_units)
        of_states = {"num_states": config.max_running} if model.has_states else {}
        self._runner = new_runner(
            model,
            self.num_units,
            grammars=self.grammars,
            end_ids=eos_ids,
            cuda_graphs=config.cuda_graphs,
            **of_states,
        )
        self._lookup = _lookup_of(model, config, eos_ids)
        self._scheduler = Scheduler(
            self._pool,
            num_layers=self._layout.num_layers,
            max_running=config.max_running,
            cache_units=cache_units,
            shape=model.shape,
            layout=self._layout,
            lookup=self._lookup,
        )
        self._idle = IdleReading(self._scheduler.cache, self._layout)
        self._idle_job: Job | None = None
        self._pace = pace = Pace(target_s=config.step_target_s)
        self._disk = open_disk_cache(
            config,
            model,
            self._runner.copies,
            self._scheduler.cache,
            lambda: pace.seconds_per_cost,
        )
        self._salt = secrets.token_bytes(32) if self._disk is None else self._disk.folder.key
        if self._disk is not None:
            self._scheduler.begin_load = self._disk.begin_load
        self._events = EventMaker(model.shape, self._layout, eos_ids)
        self._jobs: dict[int, Job] = {}
        self._present = Presence()
        self._internal_errors = dict.fromkeys(_CAUGHT, 0)
        self._logged_s: dict[str, float] = {}
        self._stored_at, self._stored = 0, dict[str, StoredDocument]()
        # requests that want only a selection, which is known without a pass
        self._decided: list[Job] = []
        self._num_added = 0
        self._looked_late_s = -math.inf

    def filter_by(self, config: ResolvedEngineConfig, calibration: Calibration) -> None:
        """Filter so from now on. Requests that have been planned run as they were.

        `config` differs from the one before only in what follows from the calibration.
        """
        self.config, self.calibration = config, calibration
        self.planner = FilterPlanner(
            method=config.filter_method,
            keep=config.filter_keep,
            min_tokens=config.filter_min_tokens,
            segment_size=config.filter_window,
            reads_cached_whole=config.when_cached == "whole",
            fails_open=config.filter_on_error == "full",
            calibration=calibration,
            sliding_windows=self.model.sliding_windows,
            shape=self.model.shape,
            context_tokens=self.model.context_tokens,
            longest_sequence=self.longest_sequence,
            longest_prompt=config.max_prompt_tokens,
            longest_pass=config.max_pass_tokens,
        )

    @property
    def reads_with(self) -> Core:
        """The core whose model reads documents that belong to no prompt, such as a library's."""
        return self

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are recorded and replayed."""
        return self._runner.has_graphs

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running) - self._num_idle(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) - self._num_idle(self._scheduler.waiting)

    @property
    def waiting_of(self) -> Mapping[bytes, int]:
        """How many requests of each tenant wait."""
        return Counter(self._jobs[s.order].request.tenant for s in self._scheduler.waiting)

    @property
    def internal_errors(self) -> Mapping[str, int]:
        """How often something failed that was done in another way, or left out, since the start."""
        on_disk = 0 if self._disk is None else self._disk.counts.errors
        return {**self._internal_errors, "cache_disk": on_disk}

    @property
    def kv_usage_ratio(self) -> float:
        return self._held_units / self.num_units

    @property
    def kv_bytes_used(self) -> int:
        return self._held_units * self.model.shape.unit_bytes

    @property
    def cache_usage_ratio(self) -> float:
        """How much of the KV memory the document cache holds. Requests may have it at any time."""
        return self._scheduler.cache.used / self._pool.capacity

    @property
    def cache_counts(self) -> CacheCounts:
        return self._scheduler.cache.counts

    @property
    def cache_state(self) -> CacheState:
        """The document cache for metrics: a copy that stays as it is."""
        return state_of(self._scheduler.cache, self._disk, self.model.shape)

    @property
    def stored_documents(self) -> Mapping[str, StoredDocument]:
        """What the cache has of stored documents, by id."""
        cache = self._scheduler.cache
        if self._stored_at != cache.num_changes:
            self._stored_at, self._stored = cache.num_changes, cache.stored()
        return self._stored

    @property
    def _held_units(self) -> int:
        """Units that requests hold."""
        return self._pool.used - self._scheduler.cache.used

    @property
    def is_idle(self) -> bool:
        has_work = self._has_requests or self._idle_job is not None or self._idle.has_work
        return not has_work and (self._disk is None or not self._disk.has_work)

    @property
    def _has_requests(self) -> bool:
        is_busy = len(self._scheduler.sequences) > (self._idle_job is not None)
        return is_busy or bool(self._decided)

    def step(self) -> Emitted:
        """Draw a token for every decoding sequence, or read a slice of an unfinished prompt."""
        if self._disk is not None:
            self._disk.work()
            self._runner.change_memory(self._pool.take_changes())
        if not self._has_requests and not self._is_reading_idly():
            if self._disk is not None:
                self._disk.wait(_DISK_WAIT_S)
            return []
        if self._decided:
            return self._end_decided()
        if late := self._end_late():
            return late
        limits = self._limits()
        plan = self._scheduler.schedule(
            limits.chunk_tokens,
            is_decode_due=limits.is_decode_due,
            portion=limits.portion,
        )
        out = self._runner.run(plan, limits)
        emitted = self._events.of_step(plan, out, self._jobs)
        emitted = [(job, self._with_attention(job, event, out)) for job, event in emitted]
        self._scheduler.commit(plan, step_output(out, emitted))
        self._runner.change_memory(self._pool.take_changes())
        self._observe(plan, out, limits)
        self._note_retries(out)
        self._note_choices(out)
        if plan.is_empty and self._disk is not None:  # all that is running waits for the disk
            self._disk.wait(_DISK_WAIT_S)
        elif plan.is_empty:  # or for other engines
            time.sleep(_LENT_WAIT_S)
        self._forget_finished(emitted)
        return self._without_idle_job(emitted)

    def check(self, request: Request) -> None:
        """Raise if a planned request could not run. Any thread may call this: it is arithmetic.

        Raises `CapacityExceeded` if it could not run even alone, and `RequestError` if its prompt
        is too long to be pinned, or it asks for what several ranks do not have.
        """
        if self.model.shard is not None and request.filter.return_attention:
            raise RequestError(
                "filter.return_attention=true: not on this server, whose model is divided among "
                f"{self.model.shard.num_ranks} ranks (--tensor-parallel)",
                param="filter.return_attention",
            )
        if self.model.has_states and request.filter.return_attention:
            raise RequestError(
                "filter.return_attention=true: not for this model: layers keep a recurrent state, "
                "so that no token of an answer can be looked at again",
                param="filter.return_attention",
            )
        largest = max(request.prompt_ids, default=0)
        if largest >= self.model.vocab_size:
            raise RequestError(
                f"prompt: token id {largest} is not one of the model's, which has "
                f"{self.model.vocab_size}: its tokenizer has more tokens than the model",
                param="prompt",
            )
        sequence = LiveSequence(request=request, order=0)
        check_capacity(sequence, self.num_units, self._layout, self.model.shape.unit_bytes)
        if request.pin:
            check_pin(sequence, self._scheduler.cache, self.model.shape)

    def add(self, request: Request) -> Job:
        """Queue a request. Raises `InvalidGrammar`.

        One that has no filter plan yet is planned and checked here: see `FilterPlanner.planned` and
        `check`.
        """
        self._end_idle_reading()
        if request.plan is None:
            request = self.planner.planned(request)
            self.check(request)
        # what an API key is known by stays in the API: the cache has a name of its own for it
        tenant = request.tenant
        if tenant:  # without keys all requests are alike, and share nothing out
            tenant = hashlib.blake2b(tenant, key=self._salt, digest_size=16).digest()
        return self._queue(request, replace(request, tenant=tenant))

    @cached_property
    def _markers(self) -> Mapping[int, str]:
        return shown_markers(self.tokenizer, self.eos_ids)

    def _markers_of(self, request: Request) -> Mapping[int, str]:
        """The markers that the text of the request's answer shows."""
        return self._markers if request.shows_markers else NO_MARKERS

    def _queue(self, request: Request, of_engine: Request) -> Job:
        """Queue a request. `of_engine`: the same with the cache's own name for its tenant."""
        self._num_added += 1
        sequence = LiveSequence(request=of_engine, order=self._num_added)
        job = Job(
            request=request,
            sequence=sequence,
            text=TextStream(
                self.tokenizer, request.sampling.stop, self._markers_of(request), _before(request)
            ),
            reason=sequence.plan.reason,
        )
        if request.selects_only and sequence.filter_layer is None:
            self._decided.append(job)
        else:
            adapter = _adapter_of(request)
            named = AdapterName(adapter.name, adapter.version, adapter.num_positions)
            of_runner = replace(request, adapter=None if adapter is NO_ADAPTER else named)
            self._runner.begin(Task(sequence.order, of_runner), adapter)
            if self._lookup is not None and sequence.plan.answer_layer is None:
                sequence.text_index = TextIndex() if self.model.steps(adapter) else None
            self._scheduler.add(sequence)
            if sequence.segment_pass is not None:
                lend_groups(self._scheduler.cache, sequence, request.lent_groups)
        self._jobs[sequence.order] = job
        if of_engine.priority != LAST:  # else nobody waits for it
            self._present.arrive(of_engine.tenant)
        return job

    def cancel(self, job: Job) -> Emitted:
        """End a request at once and free its memory. Idempotent."""
        if job.sequence.order not in self._jobs:
            return []
        if job in self._decided:
            self._decided.remove(job)
        else:
            self._scheduler.finish(job.sequence)
        self._runner.change_memory(self._pool.take_changes())
        count = len(job.sequence.generated)
        emitted: Emitted = [(job, self._events.finished(job, "abort", count))]
        self._forget_finished(emitted)
        return emitted

    def forget_documents(self, ids: Collection[str]) -> None:
        """Drop what is cached of stored documents, and overwrite its memory with zeros.

        A request that contains one of them goes on, and its memory is overwritten when it ends. An
        id is never used again.
        """
        self._scheduler.forget_documents(ids)
        self._idle.forget(ids)
        if self._disk is not None:
            self._disk.forget(ids)
        self._runner.change_memory(self._pool.take_changes())

    def lent_groups(self, job: Job) -> LentGroups:
        """The groups of a request's segments that others should read: see `take_group`."""
        reading, rate = job.sequence.segment_pass, self._pace.seconds_per_cost
        if reading is None or not reading.lent:
            return LentGroups()
        tokens = sum(reading.num_tokens_of(reading.groups[number]) for number in reading.lent)
        seconds = None if rate is None else rate * reading.flops(self.model.shape, 0, tokens)
        return LentGroups(numbers=tuple(sorted(reading.lent)), seconds=seconds)

    def take_group(self, job: Job, group: int, read: SegmentsRead | None) -> None:
        """Take what another engine has read of a lent group. None: nobody has, so read it here.

        Nothing happens if the group is not lent.
        """
        reading = job.sequence.segment_pass
        if reading is None or group not in reading.lent:
            return
        if read is None:
            reading.lent.remove(group)
        else:
            reading.arrived[group] = read

    def progress(self, job: Job) -> Progress | None:
        """How far a request has come. None: it has its first token, or has ended."""
        running_s = 0.0 if job.started_s is None else time.monotonic() - job.started_s
        rate = self._pace.seconds_per_cost
        return find_progress(
            job.sequence, self.model.shape, running_s=running_s, seconds_per_flop=rate
        )

    def run_alone(
        self, request: Request, on_progress: Callable[[Progress], None] | None = None
    ) -> Iterator[Event]:
        """All events of one request while nothing else runs, for use without a server.

        `on_progress` is called after every step until the first token.
        """
        assert not self._has_requests
        job = self.add(request)
        is_over = False
        while not is_over:
            for _, event in self.step():
                is_over = isinstance(event, Finished)
                yield event
            progress = None if on_progress is None else self.progress(job)
            if on_progress is not None and progress is not None:
                on_progress(progress)

    def close(self) -> None:
        """End what is being written to disk. Call it last. Idempotent."""
        if self._disk is not None:
            self._disk.close()

    def check_integrity(self) -> None:
        """Prove that states and memory agree. Raises `AssertionError`."""
        self._scheduler.check_integrity()
        decided = [job.sequence for job in self._decided]
        known = {job.sequence for job in self._jobs.values()}
        assert known == {*self._scheduler.running, *self._scheduler.waiting, *decided}

    def _is_reading_idly(self) -> bool:
        """Is a document being read whole that was asked about repeatedly? If there is one, yes."""
        request = None if self._idle_job is not None else self._idle.next_request()
        if request is not None:
            with suppress(CapacityExceeded):
                self.check(request)
                self._idle_job = self._queue(request, request)
        return self._idle_job is not None

    def _end_idle_reading(self) -> None:
        """Leave what was read in idle time, up to its last whole chunk, to the cache."""
        job, self._idle_job = self._idle_job, None
        if job is None:
            return
        self._runner.forget([job.sequence.order])
        self._scheduler.finish(job.sequence)
        self._runner.change_memory(self._pool.take_changes())
        self._drop(job.sequence.order)

    def _without_idle_job(self, emitted: Emitted) -> Emitted:
        """The events of requests that somebody waits for."""
        idle = self._idle_job
        if idle is None:
            return emitted
        if any(job is idle and isinstance(event, Finished) for job, event in emitted):
            self._idle_job = None
        return [(job, event) for job, event in emitted if job is not idle]

    def _num_idle(self, sequences: Collection[LiveSequence]) -> int:
        return int(self._idle_job is not None and self._idle_job.sequence in sequences)

    def _note_choices(self, out: RunOutput) -> None:
        """Remember prompts that filters have chosen from."""
        for number in out.kept:
            if number in self._jobs:
                self._idle.note(self._jobs[number].sequence)

    def _with_attention(self, job: Job, event: Event, out: RunOutput) -> Event:
        """The event; if it ends an answer that is watched, with what the answer attended to."""
        drawn = out.drawn.get(job.sequence.order)
        is_watched = job.sequence.plan.answer_layer is not None
        if not isinstance(event, Finished) or drawn is None or not is_watched:
            return event
        found = None
        answer = [*job.sequence.generated, *(each.token for each in drawn)][:MOST_ANSWER_TOKENS]
        markers, before = self._markers_of(job.request), _before(job.request)
        try:
            offsets = token_offsets(self.tokenizer, answer, markers, before)
        except Exception as error:
            log.warning("request %s: no attention of its answer: %s", job.request.request_id, error)
        else:
            found = self._runner.watched_answer(job.sequence.order, offsets)
        self._internal_errors["answer_attention"] += found is None
        return replace(event, attention=found)

    def _limits(self) -> StepLimits:
        """How much the next step may do, given how fast the last steps were."""
        shape, pace, config = self.model.shape, self._pace, self.config
        crowd = replace(self._crowd(), portion=self._portion())
        piece_cost = pace.piece_cost(crowd)
        # only attention is cut into pieces; a layer's matrix products over a chunk are one piece
        fitting = int(piece_cost / shape.layer(0, 1))
        return StepLimits(
            chunk_tokens=max(config.min_chunk_tokens, min(config.max_chunk_tokens, fitting)),
            slice_s=pace.slice_s(crowd),
            piece=int(piece_cost / shape.pair()),
            is_decode_due=pace.is_decode_due(crowd),
            portion=crowd.portion,
        )

    def _crowd(self) -> Crowd:
        """Who shares the time until the next decode step, without what tenants may have of it."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        decoding = sum(sequence.state is State.DECODING for sequence in running)
        return Crowd(decoding, len(running) + len(waiting) - decoding)

    def _portion(self) -> Portion | None:
        """What tenants may have of the next step. None: there is one tenant."""
        if not self._present.is_shared(time.monotonic()):
            return None
        all_of = [*self._scheduler.running, *self._scheduler.waiting]
        asked = [sequence for sequence in all_of if sequence.request.priority != LAST]
        return self._pace.divide(loads_of(asked, lambda s: s.state is State.DECODING))

    def _observe(self, plan: StepPlan, out: RunOutput, limits: StepLimits) -> None:
        """Tell the pace how long a step took."""
        if plan.decodes:
            num_rows = sum(1 + len(row.proposed) for row in plan.decodes)
            self._pace.observe_decode(out.taken_s, num_rows, limits.portion)
        if plan.chunk is not None:
            self._pace.observe_slice(out.taken_s, limits.portion)
            sequence = self._jobs[plan.chunk.sequence].sequence
            sequence.open_s = 0.0 if out.is_chunk_done else sequence.open_s + out.taken_s
            if out.pass_s:
                self._pace.observe_pass(out.pass_s, plan.chunk.cost(self.model.shape))

    def _end_decided(self) -> Emitted:
        """End the requests that want only a selection, and whose selection is known."""
        emitted = [(job, event) for job in self._decided for event in self._events.of_decided(job)]
        self._decided = []
        self._forget_finished(emitted)
        return emitted

    def _end_late(self) -> Emitted:
        """End the requests that have waited too long and of which nothing is read.

        While another's pass, or the disk, brings what one begins with, it does not wait for a turn.
        That is asked a few times only: it compares each that waits with all that is read.
        """
        now_s, emitted = time.monotonic(), Emitted()
        if now_s < self._looked_late_s + _LATE_PERIOD_S:
            return emitted
        self._looked_late_s = now_s
        for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
            job, limit_s = self._jobs[sequence.order], sequence.request.begin_within_s
            waited_s = now_s - max(job.added_s, job.led_s)
            if job.started_s is not None or waited_s <= limit_s / 2:
                continue
            if waited_s <= limit_s and now_s < job.asked_s + limit_s / _TIMES_ASKED:
                continue
            job.asked_s = now_s
            if sequence.is_loading or self._scheduler.is_led(sequence):
                job.led_s = now_s
            elif waited_s > limit_s:
                self._scheduler.finish(sequence)
                error = f"its reading had not begun after {waited_s:.1f} s"
                end = self._events.finished(job, "error", 0, error)
                emitted.append((job, replace(end, late="not_begun")))
        if emitted:
            self._runner.change_memory(self._pool.take_changes())
            self._forget_finished(emitted)
        return emitted

    def _forget_finished(self, emitted: Emitted) -> None:
        ended = [job.sequence.order for job, event in emitted if isinstance(event, Finished)]
        for number in ended:
            self._drop(number)
        if ended:
            self._runner.forget(ended)

    def _drop(self, number: int) -> None:
        """Forget the job of a request that has ended."""
        request = self._jobs.pop(number).sequence.request
        if request.priority != LAST:
            self._present.leave(request.tenant, time.monotonic())

    def _note_retries(self, out: RunOutput) -> None:
        """Count what failed and was done in another way; log each kind of batch once a minute."""
        self._internal_errors["filter_pass"] += sum(kept.has_failed for kept in out.kept.values())
        for name, error in out.retried:
            self._internal_errors[name] += 1
            now_s = time.monotonic()
            if now_s - self._logged_s.get(name, -math.inf) >= _LOG_EVERY_S:
                self._logged_s[name] = now_s
                log.warning("%s failed, and was done for each sequence alone: %s", name, error)


def _lookup_of(
    model: CausalModel, config: ResolvedEngineConfig, end_ids: Collection[int]
) -> PromptLookup | None:
    """What proposes tokens, if decode steps can try several of one sequence.

    Raises `ConfigError` if they must and cannot.
    """
    if config.prompt_lookup == "off":
        return None
    # a sliding window's memory and a recurrent state have no way back from a wrong token
    has_way_back = not model.shape.windowed_layers and not model.has_states
    if has_way_back and model.steps(NO_ADAPTER):
        return PromptLookup(end_ids, is_forced=config.prompt_lookup == "on")
    if config.prompt_lookup == "on":
        why = "decode steps are not compiled (--cpu-step)"
        if not has_way_back:
            why = "layers of this model have a sliding window or keep a recurrent state"
        raise ConfigError(f"prompt_lookup=on: {why}")
    return None


def _before(request: Request) -> Sequence[int]:
    """The tokens that the text of a request's answer goes on with."""
    return request.prompt_ids[-_LAST_OF_PROMPT:] if request.goes_on else ()


def _adapter_of(request: Request) -> Adapter:
    adapter = request.adapter
    if adapter is None:
        return NO_ADAPTER
    assert isinstance(adapter, Adapter)
    return adapter
