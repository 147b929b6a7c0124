"""Carries out one step's plan on the model. The only part of the engine that touches tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from gemserve.decoding.sampling import Draw, SamplerState, draw, score_tokens
from gemserve.engine.eviction import evict
from gemserve.engine.passes import Pass, device_queue
from gemserve.engine.scheduler import Chunk, Plan
from gemserve.engine.sequence import Sequence
from gemserve.filtering.methods import METHODS, selector_of
from gemserve.filtering.selector import Choice, Evidence, LayerEvidence
from gemserve.filtering.snapkv import SnapKV
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.causal import CausalModel
from gemserve.model.graphs import build_graphs
from gemserve.model.kv import DecodeBatch, KVSpan
from gemserve.model.query_tap import FilterTap, QueryTap
from gemserve.types import Switch, TokenLogprob

log = logging.getLogger("gemserve.engine")
T = TypeVar("T")
Forward = Callable[..., torch.Tensor | None]
Logits = list[tuple[list[Sequence], torch.Tensor]]  # [sequences, vocab] of each, float32


@dataclass(slots=True)
class RunOutput:
    """What a plan's sequences got: a token each, a choice of positions, or the error they hit.

    `scored`: log-probabilities of prompts read whole. `evicted`: those whose keys and values were
    thinned out, which leaves no one set of positions. `is_chunk_done`: the plan's chunk is through;
    `pass_s`: seconds it took in all its steps. `taken_s`: seconds of this step.
    """

    started_s: float
    draws: dict[Sequence, Draw] = field(default_factory=dict)
    chosen: dict[Sequence, Choice] = field(default_factory=dict)
    scored: dict[Sequence, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    evicted: list[Sequence] = field(default_factory=list)
    failures: dict[Sequence, Exception] = field(default_factory=dict)
    is_chunk_done: bool = False
    pass_s: float = 0.0
    taken_s: float = 0.0


class Runner:
    """Owns the bytes of the memory pool and what unfinished filter passes have collected."""

    def __init__(self, model: CausalModel, num_units: int, cuda_graphs: Switch) -> None:
        """Raises `ConfigError` where CUDA graphs are "on" and cannot be had."""
        self._model = model
        self._memory = model.new_memory(num_units)
        self._graphs = build_graphs(model, self._memory, cuda_graphs)
        self._passes: dict[Sequence, Pass] = {}
        self._taps: dict[Sequence, FilterTap] = {}
        self._query_taps: dict[Sequence, QueryTap] = {}
        self._scores: dict[Sequence, list[TokenLogprob]] = {}
        self._kept: dict[Sequence, tuple[int, KVSpan]] = {}

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    # one inference mode around everything: passes are left and re-entered in the middle of theirs
    @torch.inference_mode()
    def run(
        self,
        plan: Plan,
        samplers: Mapping[Sequence, SamplerState],
        *,
        slice_s: float,
        piece: int,
    ) -> RunOutput:
        """Advance every sequence of the plan, its chunk for about `slice_s` seconds.

        `piece`: query-key pairs after which a pass that begins now can be left.
        One that fails does not take others with it.
        """
        assert not (plan.moves and self._passes), "a pass under way points to what is moved"
        for move in plan.moves:
            self._memory.move(move.source, move.target, move.size)
        out = RunOutput(started_s=time.monotonic())
        logits: Logits = []
        self._decode(plan, logits, out)
        if plan.chunk is not None:
            self._alone(
                plan.chunk.sequence, out, self._read, plan.chunk, slice_s, piece, logits, out
            )
            if plan.chunk.is_filter and plan.chunk.sequence.plan.fails_open:
                self._open(plan.chunk.sequence, out)
        if logits:
            sequences = [sequence for some, _ in logits for sequence in some]
            matrices = [rows for _, rows in logits]
            rows = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
            drawn = draw(rows, [samplers[sequence] for sequence in sequences])
            for sequence, result in zip(sequences, drawn, strict=True):
                if isinstance(result, Exception):
                    out.failures[sequence] = result
                else:
                    out.draws[sequence] = result
        # a GPU is through with decoding only when tokens are drawn
        out.taken_s = time.monotonic() - out.started_s
        return out

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended. Idempotent."""
        under_way = self._passes.pop(sequence, None)
        if under_way is not None:
            under_way.abandon()
        self._taps.pop(sequence, None)
        self._query_taps.pop(sequence, None)
        self._scores.pop(sequence, None)
        self._kept.pop(sequence, None)

    def _decode(self, plan: Plan, logits: Logits, out: RunOutput) -> None:
        """One token of every decoding sequence: together, or one by one if that fails."""
        by_model: dict[CausalModel, list[Sequence]] = {}
        for sequence in plan.decodes:
            by_model.setdefault(self._model_of(sequence), []).append(sequence)
        for sequences in by_model.values():
            with suppress(Exception):
                logits.append((sequences, self._decode_rows(sequences)))
                continue
            for sequence in sequences:  # not within a handler: these errors would hold that one
                # without graphs, whose logits the next one would overwrite
                row = self._alone(sequence, out, self._decode_rows, [sequence], False)
                if row is not None:
                    logits.append(([sequence], row))

    def _decode_rows(self, sequences: list[Sequence], may_replay: bool = True) -> torch.Tensor:
        """Of sequences that run on one model: logits [sequences, vocab], float32."""
        spans = [self._kept_kv(s) for s in sequences]
        batch = DecodeBatch(
            self._memory,
            spans,
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

    def _read(
        self,
        chunk: Chunk,
        slice_s: float,
        piece: int,
        logits: Logits,
        out: RunOutput,
    ) -> None:
        """Go on with a chunk's pass; at the end of a sequence's last one, what comes of it."""
        sequence = chunk.sequence
        if sequence not in self._passes:
            self._passes[sequence] = self._pass(chunk, piece)
        under_way = self._passes[sequence]
        out.is_chunk_done = under_way.run(slice_s)
        if not out.is_chunk_done:
            return
        del self._passes[sequence]
        out.pass_s = under_way.spent_s
        count = sequence.request.prompt_logprobs
        if count is not None:
            assert under_way.result is not None
            self._score(chunk, under_way.result, count)
        if not chunk.is_last:
            return
        if chunk.is_filter:
            out.chosen[sequence] = self._choose(sequence, self._taps.pop(sequence))
            return
        assert under_way.result is not None
        if sequence.evicts:  # first: should it fail, no token has been drawn
            self._evict(sequence, self._query_taps.pop(sequence))
            out.evicted.append(sequence)
        if count is not None:
            out.scored[sequence] = tuple(self._scores.pop(sequence))
        logits.append(([sequence], under_way.result[-1:]))

    def _open(self, sequence: Sequence, out: RunOutput) -> None:
        """Let a sequence whose filter pass has failed go on with its whole prompt."""
        error = out.failures.pop(sequence, None)
        if error is None:
            return
        log.warning(
            "request %s: read whole, its filter failed: %s: %s",
            sequence.request.request_id,
            type(error).__name__,
            error,
        )
        self.forget(sequence)
        out.chosen[sequence] = Choice(positions=torch.arange(sequence.num_prompt), has_failed=True)
        out.is_chunk_done = True

    def _score(self, chunk: Chunk, logits: torch.Tensor, count: int) -> None:
        """Remember how likely the tokens are that follow each of the chunk's."""
        sequence, start = chunk.sequence, chunk.start
        following = list(sequence.ids[start + 1 : start + chunk.count + 1])
        known = self._scores.setdefault(sequence, [])
        known += score_tokens(logits[: len(following)], following, count)

    def _pass(self, chunk: Chunk, piece: int) -> Pass:
        forward = self._filtering(chunk) if chunk.is_filter else self._prefilling(chunk)
        catch_up = device_queue(self._model.device)
        return Pass(lambda breaks: forward(breaks=breaks), piece, catch_up)

    def _prefilling(self, chunk: Chunk) -> Forward:
        sequence = chunk.sequence
        if sequence.evicts and sequence not in self._query_taps:
            rows = _evictor_of(sequence).rows(sequence.num_prompt)
            layers = range(self._model.num_layers)
            self._query_taps[sequence] = self._model.new_query_tap(layers, rows)
        return partial(
            self._model_of(sequence).prefill_chunk,
            sequence.ids[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            kv=self._kept_kv(sequence),
            rope_tokens=sequence.rope_length,
            is_last=chunk.is_last,
            is_scored=sequence.request.prompt_logprobs is not None,
            query_tap=self._query_taps.get(sequence),
            adapter=_adapter_of(sequence),
        )

    def _filtering(self, chunk: Chunk) -> Forward:
        sequence = chunk.sequence
        layer, span, num_tokens = sequence.filter_layer, sequence.span, sequence.num_read
        assert layer is not None
        assert span is not None
        before, plan = self._taps.get(sequence), sequence.plan
        tap = self._taps[sequence] = FilterTap(
            layer=layer,
            keys=self._memory.keys(span.start + 2 * layer * num_tokens, num_tokens),
            queries=self._model.new_query_tap(plan.tapped, plan.rows)
            if before is None
            else before.queries,
        )
        return partial(
            self._model_of(sequence).filter_chunk,
            sequence.read_ids(chunk.start, chunk.count),
            start=chunk.start,
            kv=self._memory.kv(span.start, num_layers=layer, capacity=num_tokens),
            tap=tap,
            adapter=_adapter_of(sequence),
        )

    def _choose(self, sequence: Sequence, tap: FilterTap) -> Choice:
        """What the sequence's method keeps."""
        request, plan, span = sequence.request, sequence.plan, sequence.span
        assert span is not None
        num_read = sequence.num_read
        kv = self._memory.kv(span.start, num_layers=tap.layer, capacity=num_read)
        queries = tap.queries
        evidence = Evidence(
            num_tokens=sequence.num_prompt,
            layers={
                layer: LayerEvidence(
                    queries=queries.of(layer),
                    keys=tap.keys if layer == tap.layer else kv.read(layer, num_read)[0],
                    scale=queries.scales[layer],
                    softcap=queries.softcaps[layer],
                )
                for layer in queries.layers
            },
            rows=queries.rows,
            backend=self._model.backend,
            protected=request.protected,
            code_blocks=request.code_blocks,
            heads=plan.heads,
            coverage_bound=plan.coverage_bound,
        )
        method = request.filter.method
        choice = selector_of(method).choose(evidence, plan.budget, request.filter)
        count, budget = len(choice.positions), plan.budget
        if not (min(budget.low, budget.high) <= count <= budget.limit):
            raise ValueError(f"{method} kept {count} tokens of a budget of {budget}")
        return choice

    def _evict(self, sequence: Sequence, query_tap: QueryTap) -> None:
        """Keep of each layer's keys and values what its evictor chooses, packed for generation."""
        assert sequence.span is not None
        start, capacity = sequence.span.start, sequence.max_length
        target = self._memory.kv(start, num_layers=self._model.num_layers, capacity=capacity)
        evict(
            _evictor_of(sequence),
            query_tap,
            self._kept_kv(sequence),
            sequence.num_prompt,
            sequence.num_kept,
            target,
            self._model.backend,
        )
        self._kept[sequence] = (start, target)

    def _model_of(self, sequence: Sequence) -> CausalModel:
        """The model, or the one that the sequence's adapter makes of it."""
        own: CausalModel | None = _adapter_of(sequence).own
        return self._model if own is None else own

    def _kept_kv(self, sequence: Sequence) -> KVSpan:
        """All layers' keys and values; made anew only when compaction has moved them."""
        assert sequence.span is not None
        start = sequence.span.start
        known = self._kept.get(sequence)
        if known is None or known[0] != start:
            layers, capacity = self._model.num_layers, sequence.capacity
            known = (start, self._memory.kv(start, num_layers=layers, capacity=capacity))
            self._kept[sequence] = known
        return known[1]

    def _alone(
        self, sequence: Sequence, out: RunOutput, act: Callable[..., T], *arguments: object
    ) -> T | None:
        """Do one sequence's work; what it raises is that sequence's failure alone."""
        try:
            return act(*arguments)
        except Exception as error:
            # its frames hold the request, and in a pass its tensors: not until the collector runs
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
