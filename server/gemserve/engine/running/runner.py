"""Turns plans into tensor work: decode steps, and chunks of filter and prefill passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Ids
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from gemserve.decoding.sampling import SamplerState, score_tokens
from gemserve.engine.memory import Change, Move
from gemserve.engine.running.answer_attention import EVERY, AnswerWatch
from gemserve.engine.running.document_copy import copy_documents
from gemserve.engine.running.draws import Logits, draw_tokens
from gemserve.engine.running.memory_changes import apply_changes
from gemserve.engine.running.passes import Pass, device_queue
from gemserve.engine.running.results import RunOutput
from gemserve.engine.running.runner_state import ChunkPass, RunnerState
from gemserve.engine.running.selection import choose_positions
from gemserve.engine.running.snapkv_eviction import evict
from gemserve.engine.scheduling.pace import StepLimits
from gemserve.engine.sequence.sequence import Sequence
from gemserve.engine.sequence.step_plan import Chunk, Plan
from gemserve.filtering.methods import METHODS
from gemserve.filtering.selector import Choice
from gemserve.filtering.snapkv import SnapKV
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.causal_model import CausalModel
from gemserve.model.graphs import build_graphs
from gemserve.model.kv import DecodeBatch, KVSpan
from gemserve.model.query_tap import FilterTap, QueryTap
from gemserve.scores import AnswerAttention
from gemserve.types import Switch

log = logging.getLogger("gemserve.engine")
T = TypeVar("T")
Forward = Callable[..., torch.Tensor | None]


class Runner:
    """Owns the bytes of the memory pool, and a `RunnerState` for each sequence."""

    def __init__(self, model: CausalModel, num_units: int, cuda_graphs: Switch) -> None:
        """Raises `ConfigError` if `cuda_graphs` is "on" and graphs cannot be used."""
        self._model = model
        self.memory = model.new_memory(num_units)
        self._graphs = build_graphs(model, self.memory, cuda_graphs)
        self._states: dict[Sequence, RunnerState] = {}

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    # one inference mode around all passes, because a pass pauses and resumes in the middle
    @torch.inference_mode()
    def run(
        self, plan: Plan, samplers: Mapping[Sequence, SamplerState], limits: StepLimits
    ) -> RunOutput:
        """Advance every sequence of the plan. A sequence that fails does not stop the others."""
        self.change_memory(plan.moves)
        out = RunOutput(started_s=time.monotonic())
        for copy in plan.copies:
            self._try(copy.sequence, out, copy_documents, [copy], self.memory)
        logits: Logits = []
        self._decode(plan, logits, out)
        if plan.chunk is not None and plan.chunk.sequence not in out.failures:
            sequence = plan.chunk.sequence
            self._try(sequence, out, self._read, plan.chunk, limits, logits, out)
            if plan.chunk.is_filter and sequence.plan.fails_open:
                self._keep_all_after_failure(sequence, out)
        if logits:
            draw_tokens(logits, samplers, out)
        # drawing tokens waits until the GPU has finished decoding
        out.taken_s = time.monotonic() - out.started_s
        return out

    @torch.inference_mode()
    def watched_answer(self, sequence: Sequence, offsets: Ids[int]) -> AnswerAttention | None:
        """What the answer attended to, when its last token has been drawn; see `AnswerWatch`."""
        try:
            return self._watch(sequence, 1).report(offsets)
        except Exception as error:
            request_id = sequence.request.request_id
            log.warning("request %s: no attention of its answer: %s", request_id, error)
            return None

    def _watch(self, sequence: Sequence, least: int) -> AnswerWatch:
        """Look at the answer, if at least `least` tokens are new. The newest one is being drawn."""
        state = self._state_of(sequence)
        if state.watch is None:
            model, adapter = self._model_of(sequence), _adapter_of(sequence)
            state.watch = AnswerWatch(sequence, model, adapter)
        state.watch.look(len(sequence.generated) + 1, self._kept_kv(sequence), least=least)
        return state.watch

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended. Idempotent."""
        state = self._states.pop(sequence, None)
        if state is not None and state.chunk_pass is not None:
            state.chunk_pass.forward.abandon()

    def change_memory(self, changes: Collection[Change]) -> None:
        """Carry out what the pool has decided."""
        if any(isinstance(change, Move) for change in changes):
            unfinished = any(state.chunk_pass for state in self._states.values())
            assert not unfinished, "a pass that has begun holds views of memory that moves"
        apply_changes(changes, self.memory)

    def _decode(self, plan: Plan, logits: Logits, out: RunOutput) -> None:
        """One token of every decoding sequence: together, or one by one if that fails."""
        by_model: dict[CausalModel, list[Sequence]] = {}
        for sequence in plan.decodes:
            by_model.setdefault(self._model_of(sequence), []).append(sequence)
        watched = [s for s in plan.decodes if s.plan.answer_layer is not None]
        for sequences in by_model.values():
            with suppress(Exception):
                logits.append((sequences, self._decode_rows(sequences)))
                continue
            # outside of the exception handler, which would keep the failed step's tensors alive
            for sequence in sequences:
                # without graphs, because the next replay would overwrite the logits
                row = self._try(sequence, out, self._decode_rows, [sequence], False)
                if row is not None:
                    logits.append(([sequence], row))
        for sequence in watched:
            if sequence not in out.failures:
                self._try(sequence, out, self._watch, sequence, EVERY)

    def _decode_rows(self, sequences: list[Sequence], may_replay: bool = True) -> torch.Tensor:
        """Logits of sequences that run on one model: [sequences, vocab], float32."""
        batch = DecodeBatch(
            self.memory,
            [self._kept_kv(s) for s in sequences],
            slots=[s.next_slot for s in sequences],
            positions=[s.next_slot + s.num_evicted for s in sequences],
        )
        ids = [s.generated[-1] for s in sequences]
        adapters = [_adapter_of(s) for s in sequences]
        is_plain = all(adapter is NO_ADAPTER for adapter in adapters)
        graphs = self._graphs
        if graphs is not None and may_replay and is_plain and graphs.takes(len(ids)):
            return graphs.decode(ids, batch)
        model = self._model_of(sequences[0])
        return model.decode(ids, batch, [s.rope_length for s in sequences], adapters)

    def _read(self, chunk: Chunk, limits: StepLimits, logits: Logits, out: RunOutput) -> None:
        """Continue a chunk's pass. After a sequence's last chunk, use the results of the pass."""
        sequence, state = chunk.sequence, self._state_of(chunk.sequence)
        if state.chunk_pass is None:
            state.chunk_pass = self._begin(chunk, limits.piece, state)
        forward, filter_tap = state.chunk_pass.forward, state.chunk_pass.filter_tap
        out.is_chunk_done = forward.run(limits.slice_s)
        if not out.is_chunk_done:
            return
        state.chunk_pass = None
        out.pass_s = forward.spent_s
        if filter_tap is not None:
            if chunk.is_last:
                state.query_tap = None
                out.chosen[sequence] = self._choose(sequence, filter_tap)
            return
        if forward.result is None:  # not the last chunk, and not scored
            return
        count = sequence.request.prompt_logprobs
        if count is not None:
            following = list(sequence.ids[chunk.start + 1 : chunk.start + chunk.count + 1])
            state.scores += score_tokens(forward.result[: len(following)], following, count)
        if not chunk.is_last:
            return
        if state.query_tap is not None:  # evict first: if it fails, no token has been drawn
            self._evict(sequence, state, state.query_tap)
            out.evicted.append(sequence)
        if count is not None:
            out.scored[sequence] = tuple(state.scores)
            state.scores = []
        logits.append(([sequence], forward.result[-1:]))

    def _keep_all_after_failure(self, sequence: Sequence, out: RunOutput) -> None:
        """Let a sequence whose filter pass failed continue with its whole prompt."""
        error = out.failures.pop(sequence, None)
        if error is None:
            return
        log.warning(
            "request %s: read whole, its filter failed: %s: %s",
            sequence.request.request_id,
            type(error).__name__,
            error,
            extra={"request_id": sequence.request.request_id},
        )
        self.forget(sequence)
        out.chosen[sequence] = Choice(positions=torch.arange(sequence.num_prompt), has_failed=True)
        out.is_chunk_done = True

    def _begin(self, chunk: Chunk, piece: int, state: RunnerState) -> ChunkPass:
        tap: FilterTap | None = None
        if chunk.filter_layer is None:
            forward = self._prefilling(chunk, state)
        else:
            tap = self._filter_tap(chunk.sequence, chunk.filter_layer, state)
            forward = self._filtering(chunk, tap)
        catch_up = device_queue(self._model.device)
        return ChunkPass(Pass(lambda breaks: forward(breaks=breaks), piece, catch_up), tap)

    def _prefilling(self, chunk: Chunk, state: RunnerState) -> Forward:
        sequence = chunk.sequence
        if sequence.evicts and state.query_tap is None:
            rows = _evictor_of(sequence).rows(sequence.num_prompt)
            state.query_tap = self._model.new_query_tap(range(self._model.num_layers), rows)
        return partial(
            self._model_of(sequence).prefill_chunk,
            sequence.ids[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            kv=self._kept_kv(sequence),
            rope_tokens=sequence.rope_length,
            is_last=chunk.is_last,
            is_scored=sequence.request.prompt_logprobs is not None,
            query_tap=state.query_tap,
            adapter=_adapter_of(sequence),
        )

    def _filter_tap(self, sequence: Sequence, layer: int, state: RunnerState) -> FilterTap:
        """A tap for one chunk. It is made anew, because memory and keys may move between chunks."""
        if state.query_tap is None:
            state.query_tap = self._model.new_query_tap(sequence.plan.tapped, sequence.plan.rows)
        num_tokens = sequence.num_read
        start = sequence.memory.start + 2 * layer * num_tokens
        keys = self.memory.keys(start, num_tokens)
        return FilterTap(layer=layer, keys=keys, queries=state.query_tap)

    def _filtering(self, chunk: Chunk, tap: FilterTap) -> Forward:
        sequence = chunk.sequence
        start, capacity = sequence.memory.start, sequence.num_read
        return partial(
            self._model_of(sequence).filter_chunk,
            sequence.read_ids(chunk.start, chunk.count),
            start=chunk.start,
            kv=self.memory.kv(start, num_layers=tap.layer, capacity=capacity),
            tap=tap,
            adapter=_adapter_of(sequence),
        )

    def _choose(self, sequence: Sequence, tap: FilterTap) -> Choice:
        return choose_positions(sequence, tap, self.memory, self._model)

    def _evict(self, sequence: Sequence, state: RunnerState, query_tap: QueryTap) -> None:
        """Pack each layer's kept keys and values without gaps."""
        start, capacity = sequence.memory.start, sequence.max_length
        target = self.memory.kv(start, num_layers=self._model.num_layers, capacity=capacity)
        evict(
            _evictor_of(sequence),
            query_tap,
            self._kept_kv(sequence),
            sequence.num_prompt,
            sequence.num_kept,
            target,
            self._model.backend,
        )
        state.query_tap, state.kv = None, target

    def _state_of(self, sequence: Sequence) -> RunnerState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = RunnerState()
        return state

    def _kept_kv(self, sequence: Sequence) -> KVSpan:
        """All layers' keys and values.

        They are looked up again only after compaction moved them.
        """
        state, start = self._state_of(sequence), sequence.memory.start
        if state.kv is None or state.kv_start != start:
            layers, capacity = self._model.num_layers, sequence.capacity
            state.kv = self.memory.kv(start, num_layers=layers, capacity=capacity)
            state.kv_start = start
        return state.kv

    def _model_of(self, sequence: Sequence) -> CausalModel:
        """The model, or the variant that the sequence's adapter makes of it."""
        adapted: CausalModel | None = _adapter_of(sequence).replacement
        return self._model if adapted is None else adapted

    def _try(
        self, sequence: Sequence, out: RunOutput, act: Callable[..., T], *arguments: object
    ) -> T | None:
        """Do one sequence's work. An error ends that sequence alone."""
        try:
            return act(*arguments)
        except Exception as error:
            # the traceback's frames would hold the request and its tensors until garbage collection
            out.failures[sequence] = error.with_traceback(None)
            return None


def _evictor_of(sequence: Sequence) -> SnapKV:
    evictor = METHODS[sequence.request.filter.method].evictor
    assert evictor is not None
    return evictor


def _adapter_of(sequence: Sequence) -> Adapter:
    adapter = sequence.request.adapter
    if adapter is None:
        return NO_ADAPTER
    assert isinstance(adapter, Adapter)
    return adapter
