"""Turns plans into tensor work: decode steps, and chunks of filter and prefill passes.

A plan says what to run by sequences' numbers, offsets and places in memory. The runner has the
tensors, and of each sequence what a `Task` says; it knows nothing of the scheduler's objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from gemserve.config import Switch
from gemserve.contract.events import TokenLogprob
from gemserve.contract.filter_plan import FilterPlan, KeysRead, QueriesRead, SummaryArrays
from gemserve.contract.requests import Request
from gemserve.contract.scores import AnswerAttention
from gemserve.cost import filter_units
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.sampling import SamplerState, score_tokens
from gemserve.engine.memory import Change, KVPlace
from gemserve.engine.running.answer_attention import EVERY, AnswerWatch
from gemserve.engine.running.draws import Logits, draw_tokens
from gemserve.engine.running.index_vectors import question_queries
from gemserve.engine.running.lockstep import ALONE, Lockstep
from gemserve.engine.running.passes import Pass, device_queue
from gemserve.engine.running.pool_bytes import PoolCopies, apply_changes, copy_tokens, pass_kv
from gemserve.engine.running.segment_reading import ArrivedGroup, SegmentGroup
from gemserve.engine.running.selection import (
    choose_from_segments,
    choose_positions,
    prompt_evidence,
)
from gemserve.engine.running.snapkv_eviction import evict
from gemserve.engine.scheduling.pace import StepLimits
from gemserve.engine.sequence.step_plan import Chunk, DecodeRow, Kept, RunOutput, StepPlan, Task
from gemserve.errors import ConfigError
from gemserve.filtering.methods import METHODS
from gemserve.filtering.segment_scores import SegmentSummary
from gemserve.filtering.snapkv import SnapKV
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.graphs import build_graphs
from gemserve.model.passes.kv import DecodeBatch, KVSpan
from gemserve.model.passes.query_tap import FilterTap, QueryTap
from gemserve.model.passes.recurrent_state import SequenceState

log = logging.getLogger("gemserve.engine")
T = TypeVar("T")
Forward = Callable[..., torch.Tensor | None]


@dataclass(slots=True)
class ChunkPass:
    """A chunk's pass that has begun. Without `filter_tap` and `segments` it is a prefill pass."""

    chunk: Chunk
    forward: Pass
    kv: KVSpan | None = None
    filter_tap: FilterTap | None = None
    segments: SegmentGroup | ArrivedGroup | None = None


@dataclass(slots=True, kw_only=True)
class RunnerState:
    """What the runner keeps of one sequence: its task, and what its passes have left.

    `model` runs it, as its adapter demands. `kept`: what its prefill pass reads; None: all of
    the prompt. `segments`: what those showed that are read, by index. `query_tap` collects queries
    until a filter or an evictor has chosen. `scores` are the log- probabilities of the prompt so
    far. `kv` has the keys and values of all layers. It is valid while the sequence's memory is at
    `kv_place`. `watch` looks at the answer, if that is wanted; `drawn` has the answer's tokens for
    it. `recurrent`: the recurrent state of the pass under way, if the model keeps one.
    """

    request: Request
    adapter: Adapter
    model: CausalModel
    sampler: SamplerState
    kept: Kept | None = None
    chunk_pass: ChunkPass | None = None
    query_tap: QueryTap | None = None
    segments: dict[int, SegmentSummary] = field(default_factory=dict)
    scores: list[TokenLogprob] = field(default_factory=list)
    kv: KVSpan | None = None
    kv_place: KVPlace | None = None
    watch: AnswerWatch | None = None
    has_watch_failed: bool = False
    drawn: list[int] = field(default_factory=list)
    recurrent: SequenceState | None = None

    @property
    def plan(self) -> FilterPlan:
        assert self.request.plan is not None
        return self.request.plan

    def kept_ids(self, start: int, count: int) -> Sequence[int]:
        """Tokens start..start+count−1 of the prefill pass, or fewer at its end."""
        ids = self.request.prompt_ids if self.kept is None else self.kept.ids
        return ids[start : start + count]


class Runner:
    """Owns the bytes of the memory pool, and a `RunnerState` for each sequence.

    `copies` copies between these bytes and the host.
    """

    def __init__(
        self,
        model: CausalModel,
        num_units: int,
        *,
        grammars: Grammars,
        end_ids: frozenset[int],
        cuda_graphs: Switch,
        lockstep: Lockstep = ALONE,
        num_states: int = 0,
    ) -> None:
        """Raises `ConfigError` if the memory cannot be had, or graphs that must be "on".

        `num_states`: the most sequences at once that have begun, if the model has recurrent states.
        """
        self._lockstep = lockstep
        self._model, self._grammars, self._end_ids = model, grammars, end_ids
        try:
            self.memory = model.new_memory(num_units)
        except RuntimeError as error:  # of torch, on any device
            num_bytes = num_units * model.shape.unit_bytes
            raise ConfigError(
                f"kv_memory: {num_bytes} bytes cannot be allocated here; lower --kv-memory"
            ) from error
        self.copies = PoolCopies(self.memory, model.dtype)
        self._graphs = build_graphs(model, self.memory, cuda_graphs)
        self._states: dict[int, RunnerState] = {}
        self._recurrent = model.new_states(num_states) if model.has_states else None

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    def begin(self, task: Task, adapter: Adapter = NO_ADAPTER) -> None:
        """Take up a sequence. Raises `InvalidGrammar`."""
        request = task.request
        grammar = request.grammar
        matcher = None if grammar is None else self._grammars.matcher(grammar)
        sampler = SamplerState(request.sampling, request.penalized_ids, self._end_ids, matcher)
        assert request.plan is not None
        adapted: CausalModel | None = adapter.replacement
        self._states[task.sequence] = RunnerState(
            request=request,
            adapter=adapter,
            model=self._model if adapted is None else adapted,
            sampler=sampler,
            kept=_chosen_before(request),
        )

    # one inference mode around all passes, because a pass pauses and resumes in the middle
    @torch.inference_mode()
    def run(self, plan: StepPlan, limits: StepLimits) -> RunOutput:
        """Advance every sequence of the plan. A sequence that fails does not stop the others."""
        self.change_memory(plan.moves)
        out = RunOutput(started_s=time.monotonic())
        for copy in plan.copies:
            self._try(copy.sequence, out, copy_tokens, copy, self.memory)
        logits: Logits = []
        self._decode(plan.decodes, logits, out)
        if plan.chunk is not None and plan.chunk.sequence not in out.failures:
            chunk, state = plan.chunk, self._states[plan.chunk.sequence]
            self._try(chunk.sequence, out, self._read, chunk, state, limits, logits, out)
            if chunk.is_filter and state.plan.fails_open:
                self._keep_all_after_failure(chunk.sequence, state, out)
        if logits and self._lockstep.draws_tokens:
            numbers = {number for some, _ in logits for number in some}
            samplers = {number: self._states[number].sampler for number in numbers}
            proposed = {row.sequence: row.proposed for row in plan.decodes}
            draw_tokens(logits, samplers, proposed, out)
        for number, drawn in out.drawn.items():
            if (state := self._states[number]).plan.answer_layer is not None:
                state.drawn += [each.token for each in drawn]
        # drawing tokens waits until the GPU has finished decoding
        out.taken_s = time.monotonic() - out.started_s
        return out

    @torch.inference_mode()
    def watched_answer(self, number: int, offsets: Sequence[int]) -> AnswerAttention | None:
        """What an answer attended to, when its last token has been drawn; see `AnswerWatch`."""
        state = self._states[number]
        if state.has_watch_failed:
            return None
        try:
            return self._watch(state, len(state.drawn), 1).report(offsets)
        except Exception as error:
            _note_blind(state, error)
            return None

    def _look(self, state: RunnerState) -> None:
        """Look at an answer with the token that is about to be drawn. It goes on if that fails."""
        if state.has_watch_failed:
            return
        try:
            self._watch(state, len(state.drawn) + 1, EVERY)
        except Exception as error:
            _note_blind(state, error)

    def _watch(self, state: RunnerState, count: int, least: int) -> AnswerWatch:
        """Look at the first `count` tokens of an answer, if at least `least` are new."""
        if state.watch is None:
            state.watch = AnswerWatch(state.request, state.kept, state.model, state.adapter)
        assert state.kv is not None
        state.watch.look(count, state.drawn, state.kv, least=least)
        return state.watch

    def forget(self, numbers: Collection[int]) -> None:
        """Drop all state of sequences that have ended. Idempotent."""
        for number in numbers:
            state = self._states.pop(number, None)
            if state is None:
                continue
            if state.chunk_pass is not None:
                state.chunk_pass.forward.abandon()
            _drop_recurrent(state)

    def change_memory(self, changes: Collection[Change]) -> None:
        """Carry out what the pool has decided. What a pass that has begun has in memory stays."""
        apply_changes(changes, self.memory)

    def _decode(self, rows: Sequence[DecodeRow], logits: Logits, out: RunOutput) -> None:
        """One token of every decoding sequence: together, or one by one if that fails."""
        for row in rows:  # once, whatever is tried again
            self._try(row.sequence, out, self._make_room, row)
        rows = [row for row in rows if row.sequence not in out.failures]
        together: dict[tuple[CausalModel, bool], list[DecodeRow]] = {}
        for row in rows:
            together.setdefault(self._decoder_of(row), []).append(row)
        for (model, _), some in together.items():
            numbers = [row.sequence for row in some for _ in (row, *row.proposed)]
            try:
                logits.append((numbers, self._decode_rows(some, model)))
                continue
            except Exception as error:
                if len(some) > 1:
                    out.retried.append(("decode_batch", described(error)))
            # outside of the exception handler, which would keep the failed step's tensors alive
            for row in some:
                # without graphs, because the next replay would overwrite the logits
                of_row = self._try(row.sequence, out, self._decode_rows, [row], model, False)
                if of_row is not None:
                    logits.append(([row.sequence] * len(of_row), of_row))
        for row in rows:
            state = self._states[row.sequence]
            if state.plan.answer_layer is not None and row.sequence not in out.failures:
                self._look(state)

    def _make_room(self, row: DecodeRow) -> None:
        """Make room for a row's token in layers with a sliding window."""
        self._kept_kv(self._states[row.sequence], row.place).make_room(row.slot)

    def _decoder_of(self, row: DecodeRow) -> tuple[CausalModel, bool]:
        """The model that decodes a row, and whether it does so without layers.

        Rows decode together if both are the same.
        """
        state = self._states[row.sequence]
        is_stepped = self._model.steps(state.adapter)
        return (self._model if is_stepped else state.model), is_stepped

    def _decode_rows(
        self, rows: Sequence[DecodeRow], model: CausalModel, may_replay: bool = True
    ) -> torch.Tensor:
        """Logits of sequences that one model decodes: [rows, vocab], float32.

        A row of each sequence's newest token, followed by those of what it proposes.
        """
        rows = [each for row in rows for each in _with_proposed(row)]
        states = [self._states[row.sequence] for row in rows]
        batch = DecodeBatch(
            self.memory,
            [self._kept_kv(state, row.place) for state, row in zip(states, rows, strict=True)],
            slots=[row.slot for row in rows],
            positions=[row.position for row in rows],
            states=[state.recurrent for state in states if state.recurrent is not None],
        )
        ids, adapters = [row.token for row in rows], [state.adapter for state in states]
        is_plain = all(adapter is NO_ADAPTER for adapter in adapters)
        graphs = self._graphs
        if graphs is not None and may_replay and is_plain and graphs.takes(len(ids)):
            return graphs.decode(ids, batch)
        return model.decode(ids, batch, [row.rope_tokens for row in rows], adapters)

    def _read(
        self, chunk: Chunk, state: RunnerState, limits: StepLimits, logits: Logits, out: RunOutput
    ) -> None:
        """Continue a chunk's pass. After a sequence's last chunk, use the results of the pass."""
        if state.chunk_pass is None:
            state.chunk_pass = self._begin(chunk, limits.piece, state)
        chunk_pass = state.chunk_pass
        begun = chunk_pass.chunk
        is_moved = (begun.place, begun.segments) != (chunk.place, chunk.segments)
        assert not is_moved, "a pass that has begun holds views of memory that has moved"
        out.is_chunk_done = chunk_pass.forward.run(limits.slice_s)
        if not out.is_chunk_done:
            return
        state.chunk_pass = None
        out.pass_s = chunk_pass.forward.spent_s
        if chunk_pass.segments is not None or chunk_pass.filter_tap is not None:
            self._end_filter_chunk(chunk, state, chunk_pass, out)
            return
        result = chunk_pass.forward.result
        if result is None:  # not the last chunk, and not scored
            return
        count = state.request.prompt_logprobs
        if count is not None:
            following = list(state.kept_ids(chunk.start + 1, chunk.count))
            state.scores += score_tokens(result[: len(following)], following, count)
        if not chunk.is_last:
            return
        if state.query_tap is not None:  # evict first: if it fails, no token has been drawn
            self._evict(chunk, state, state.query_tap)
            out.evicted.append(chunk.sequence)
        if count is not None:
            out.scored[chunk.sequence] = tuple(state.scores)
            state.scores = []
        logits.append(([chunk.sequence], result[-1:]))

    def _keep_all_after_failure(self, number: int, state: RunnerState, out: RunOutput) -> None:
        """Let a sequence whose filter pass failed continue with its whole prompt."""
        error = out.failures.pop(number, None)
        if error is None:
            return
        log.warning(
            "request %s: read whole, its filter failed: %s",
            state.request.request_id,
            error,
            extra={"request_id": state.request.request_id},
        )
        if state.chunk_pass is not None:
            state.chunk_pass.forward.abandon()
        state.chunk_pass = state.query_tap = None
        _drop_recurrent(state)
        state.segments = {}
        everything = range(len(state.request.prompt_ids))
        state.kept = None
        out.kept[number] = Kept(positions=everything, ids=state.request.prompt_ids, has_failed=True)
        out.is_chunk_done = True

    def _begin(self, chunk: Chunk, piece: int, state: RunnerState) -> ChunkPass:
        tap: FilterTap | None = None
        catch_up = device_queue(self._model.device)
        if self._recurrent is not None and state.recurrent is None:
            state.recurrent = self._recurrent.take()
        if chunk.segments or chunk.arrived:
            group = self._segment_group(chunk, state)
            forward = Pass(group.forward, piece, catch_up, self._lockstep)
            return ChunkPass(chunk, forward, segments=group)
        if chunk.filter_layer is None:
            kv = self._kept_kv(state, chunk.place)
            run = self._prefilling(chunk, state, kv)
        else:
            # made anew for each chunk, because memory may move between chunks
            kv = pass_kv(chunk.place, filter_units(state.plan.num_below), self.memory)
            if state.query_tap is None:
                plan = state.plan
                state.query_tap = self._model.new_query_tap(plan.tapped, plan.rows)
            tap = FilterTap(
                layer=chunk.filter_layer, queries=state.query_tap, num_tokens=state.request.num_read
            )
            run = self._filtering(chunk, state, kv, tap)
        paused = Pass(lambda breaks: run(breaks=breaks), piece, catch_up, self._lockstep)
        return ChunkPass(chunk, paused, kv, tap)

    def _segment_group(self, chunk: Chunk, state: RunnerState) -> SegmentGroup | ArrivedGroup:
        if chunk.arrived:
            return ArrivedGroup(state.request, chunk, self._model.device)
        return SegmentGroup(
            state.request, chunk, state.model, self.memory, state.adapter, state.recurrent
        )

    def _prefilling(self, chunk: Chunk, state: RunnerState, kv: KVSpan) -> Forward:
        if state.plan.evicts and state.query_tap is None:
            rows = _evictor_of(state).rows(len(state.request.prompt_ids))
            state.query_tap = self._model.new_query_tap(range(self._model.num_layers), rows)
        return partial(
            state.model.prefill_chunk,
            state.kept_ids(chunk.start, chunk.count),
            start=chunk.start,
            kv=kv,
            rope_tokens=chunk.rope_tokens,
            is_last=chunk.is_last,
            is_scored=state.request.prompt_logprobs is not None,
            query_tap=state.query_tap,
            adapter=state.adapter,
            state=state.recurrent,
        )

    def _filtering(self, chunk: Chunk, state: RunnerState, kv: KVSpan, tap: FilterTap) -> Forward:
        return partial(
            state.model.filter_chunk,
            state.request.read_ids(chunk.start, chunk.count),
            start=chunk.start,
            kv=kv,
            tap=tap,
            adapter=state.adapter,
            state=state.recurrent,
        )

    def _end_filter_chunk(
        self, chunk: Chunk, state: RunnerState, chunk_pass: ChunkPass, out: RunOutput
    ) -> None:
        """Note what a group of segments showed. Choose after the last chunk."""
        if state.request.vectors_only is not None:
            if chunk.is_last:
                out.vectors[chunk.sequence] = self._vectors(state, chunk_pass)
            return
        if chunk_pass.segments is not None:
            evidence = chunk_pass.segments.evidence(self._lockstep)
            summaries = chunk_pass.segments.summaries
            self._lockstep.decide(lambda: state.segments.update(summaries(evidence)))
        if not chunk.is_last:
            return
        if state.request.summarizes_only:
            out.summarized[chunk.sequence] = self._lockstep.decide(lambda: _as_arrays(state))
            state.segments = {}
            return
        kept = self._choose(chunk, state, chunk_pass)
        state.kept, state.segments, state.query_tap = kept, {}, None
        _drop_recurrent(state)  # what is kept is read anew, perhaps after waiting for memory
        out.kept[chunk.sequence] = kept

    def _vectors(self, state: RunnerState, chunk_pass: ChunkPass) -> KeysRead | QueriesRead:
        """What is wanted of a pass whose tokens are indexed, or of a question alone."""
        if isinstance(chunk_pass.segments, SegmentGroup):
            return chunk_pass.segments.keys(self._lockstep)
        kv, tap = chunk_pass.kv, chunk_pass.filter_tap
        assert kv is not None
        assert tap is not None
        return question_queries(state.plan, kv, tap, self._model, self._lockstep)

    def _choose(self, chunk: Chunk, state: RunnerState, chunk_pass: ChunkPass) -> Kept:
        request, model = state.request, self._model
        if chunk_pass.segments is not None:
            return self._lockstep.decide(
                lambda: choose_from_segments(request, _in_order(state), chunk, model)
            )
        kv, tap = chunk_pass.kv, chunk_pass.filter_tap
        assert tap is not None
        assert kv is not None
        evidence = prompt_evidence(request, kv, tap, model, self._lockstep)
        return self._lockstep.decide(
            lambda: choose_positions(request, evidence, tap, chunk.num_cached, model)
        )

    def _evict(self, chunk: Chunk, state: RunnerState, query_tap: QueryTap) -> None:
        """Pack each layer's kept keys and values without gaps."""
        num_kept = state.plan.num_kept
        capacity = num_kept + state.request.sampling.max_tokens
        place = KVPlace(chunk.place.start, capacity)
        target = pass_kv(place, 2 * self._model.shape.num_kv_layers, self.memory)
        evict(
            _evictor_of(state),
            query_tap,
            self._kept_kv(state, chunk.place),
            len(state.request.prompt_ids),
            num_kept,
            target,
            self._model.backend,
        )
        state.query_tap, state.kv, state.kv_place = None, target, place

    def _kept_kv(self, state: RunnerState, place: KVPlace) -> KVSpan:
        """All layers' keys and values. They are looked up again only when they are elsewhere."""
        if state.kv is None or state.kv_place != place:
            state.kv = pass_kv(place, 2 * self._model.shape.num_kv_layers, self.memory)
            state.kv_place = place
        return state.kv

    def _try(
        self, number: int, out: RunOutput, act: Callable[..., T], *arguments: object
    ) -> T | None:
        """Do one sequence's work. An error ends that sequence alone."""
        try:
            return act(*arguments)
        except Exception as error:
            out.failures[number] = described(error)
            return None


def _with_proposed(row: DecodeRow) -> list[DecodeRow]:
    """The row, and one for each token that it proposes."""
    following = [
        row._replace(token=token, slot=row.slot + ahead, position=row.position + ahead)
        for ahead, token in enumerate(row.proposed, start=1)
    ]
    return [row, *following]


def _note_blind(state: RunnerState, error: Exception) -> None:
    state.has_watch_failed, state.watch = True, None
    log.warning("request %s: no attention of its answer: %s", state.request.request_id, error)


def described(error: Exception) -> str:
    """An error's kind and message, without its frames, which hold requests and tensors."""
    return f"{type(error).__name__}: {error}"


def _drop_recurrent(state: RunnerState) -> None:
    if state.recurrent is not None:
        state.recurrent.give_back()
        state.recurrent = None


def _chosen_before(request: Request) -> Kept | None:
    """What a method without a pass keeps."""
    plan = request.plan
    if plan is None or plan.chosen is None:
        return None
    ids = plan.joined or [request.prompt_ids[position] for position in plan.chosen]
    return Kept(positions=plan.chosen, ids=ids, added=plan.added)


def _in_order(state: RunnerState) -> list[SegmentSummary]:
    """What all segments showed. They may have come in another order."""
    return [state.segments[index] for index in sorted(state.segments)]


def _as_arrays(state: RunnerState) -> tuple[SummaryArrays, ...]:
    assert state.plan.segments is not None
    pairs = zip(_in_order(state), state.plan.segments.segments, strict=True)
    return tuple(summary.as_arrays(segment.start) for summary, segment in pairs)


def _evictor_of(state: RunnerState) -> SnapKV:
    evictor = METHODS[state.request.filter.method].evictor
    assert evictor is not None
    return evictor
