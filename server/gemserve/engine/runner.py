"""Carries out one step's plan on the model. The only part of the engine that touches tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from gemserve.engine.sampling import Draw, InvalidLogits, SamplerState, draw
from gemserve.engine.scheduler import Chunk, Plan
from gemserve.engine.sequence import Sequence
from gemserve.filtering.selector import Evidence
from gemserve.filtering.table import EVICTORS, SELECTORS
from gemserve.model.causal import CausalModel
from gemserve.model.kv import DecodeBatch, KVSpan
from gemserve.model.seam import FilterTap, WindowTap

T = TypeVar("T")


@dataclass(slots=True)
class RunOutput:
    """What a plan's sequences got: a token each, positions kept, or the error they failed with.

    `evicted`: those whose keys and values were thinned out, which leaves no one set of positions.
    `decode_s` and `chunks_s`: seconds spent on the two halves of the step.
    """

    started_s: float
    draws: dict[Sequence, Draw] = field(default_factory=dict)
    kept: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    evicted: list[Sequence] = field(default_factory=list)
    failures: dict[Sequence, Exception] = field(default_factory=dict)
    decode_s: float = 0.0
    chunks_s: float = 0.0


class Runner:
    """Owns the bytes of the memory pool and what unfinished filter passes have collected."""

    def __init__(self, model: CausalModel, num_units: int) -> None:
        self._model = model
        self._memory = model.new_memory(num_units)
        self._queries: dict[Sequence, torch.Tensor] = {}
        self._windows: dict[Sequence, WindowTap] = {}
        self._kept: dict[Sequence, tuple[int, KVSpan]] = {}

    def run(self, plan: Plan, samplers: Mapping[Sequence, SamplerState]) -> RunOutput:
        """Advance every sequence of the plan. One that fails does not take others with it."""
        for move in plan.moves:
            self._memory.move(move.source, move.target, move.size)
        out = RunOutput(started_s=time.monotonic())
        logits: dict[Sequence, torch.Tensor] = {}
        self._decode(plan, logits, out)
        decoded_s = time.monotonic()
        for chunk in plan.chunks:
            step = self._filter if chunk.is_filter else self._prefill
            self._alone(chunk.sequence, out, step, chunk, logits, out)
        out.decode_s = decoded_s - out.started_s
        out.chunks_s = time.monotonic() - decoded_s
        if logits:
            drawn = draw(torch.stack(list(logits.values())), [samplers[s] for s in logits])
            for sequence, result in zip(logits, drawn, strict=True):
                if isinstance(result, InvalidLogits):
                    out.failures[sequence] = result
                else:
                    out.draws[sequence] = result
        return out

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended. Idempotent."""
        self._queries.pop(sequence, None)
        self._windows.pop(sequence, None)
        self._kept.pop(sequence, None)

    def _decode(self, plan: Plan, logits: dict[Sequence, torch.Tensor], out: RunOutput) -> None:
        """One token of every decoding sequence: together, or one by one if that fails."""
        if not plan.decodes:
            return
        try:
            rows = self._decode_rows(plan.decodes)
        except Exception:
            for sequence in plan.decodes:
                row = self._alone(sequence, out, self._decode_rows, (sequence,))
                if row is not None:
                    logits[sequence] = row[0]
        else:
            logits.update(zip(plan.decodes, rows, strict=True))

    def _decode_rows(self, sequences: tuple[Sequence, ...]) -> torch.Tensor:
        spans = [self._kept_kv(s) for s in sequences]
        batch = DecodeBatch(
            self._memory,
            spans,
            slots=[s.next_slot for s in sequences],
            positions=[s.next_slot + s.num_evicted for s in sequences],
        )
        return self._model.decode(
            [s.generated[-1] for s in sequences], batch, [s.rope_length for s in sequences]
        )

    def _prefill(self, chunk: Chunk, logits: dict[Sequence, torch.Tensor], out: RunOutput) -> None:
        sequence = chunk.sequence
        if sequence.evicts and sequence not in self._windows:
            window = EVICTORS[sequence.request.filter.method].window(sequence.num_prompt)
            self._windows[sequence] = self._model.new_window(window, sequence.num_prompt)
        row = self._model.prefill_chunk(
            sequence.ids[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            kv=self._kept_kv(sequence),
            rope_tokens=sequence.rope_length,
            is_last=chunk.is_last,
            window=self._windows.get(sequence),
        )
        if row is not None:
            logits[sequence] = row[0]
            if sequence.evicts:
                self._evict(sequence, self._windows.pop(sequence))
                out.evicted.append(sequence)

    def _evict(self, sequence: Sequence, window: WindowTap) -> None:
        """Keep of each layer's keys and values what its evictor chooses, packed for generation."""
        evictor = EVICTORS[sequence.request.filter.method]
        assert sequence.span is not None
        kv = self._kept_kv(sequence)
        layers = self._model.num_layers
        chosen = torch.stack(
            [
                evictor.select(
                    window.queries[layer],
                    kv.read(layer, sequence.num_prompt)[0],
                    sequence.num_kept,
                    scale=window.scales[layer],
                    softcap=window.softcaps[layer],
                )
                for layer in range(layers)
            ]
        )
        start, capacity = sequence.span.start, sequence.max_length
        target = self._memory.kv(start, num_layers=layers, capacity=capacity)
        target.pack(kv, chosen)
        self._kept[sequence] = (start, target)

    def _filter(self, chunk: Chunk, logits: dict[Sequence, torch.Tensor], out: RunOutput) -> None:
        sequence = chunk.sequence
        layer, span, num_tokens = sequence.filter_layer, sequence.span, sequence.num_prompt
        assert layer is not None
        assert span is not None
        params = sequence.request.filter
        selector = SELECTORS[params.method]
        if sequence not in self._queries:
            self._queries[sequence] = self._model.new_queries(selector.window(num_tokens))
        tap = FilterTap(
            layer=layer,
            keys=self._memory.keys(span.start + 2 * layer * num_tokens, num_tokens),
            queries=self._queries[sequence],
        )
        self._model.filter_chunk(
            sequence.request.prompt_ids[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            kv=self._memory.kv(span.start, num_layers=layer, capacity=num_tokens),
            tap=tap,
        )
        if not chunk.is_last:
            return
        evidence = Evidence(
            queries=tap.queries,
            keys=tap.keys,
            scale=tap.scale,
            softcap=tap.softcap,
            protected=sequence.request.protected,
        )
        with torch.inference_mode():
            kept = selector.select(evidence, sequence.num_kept, params)
        out.kept[sequence] = tuple(kept.tolist())
        del self._queries[sequence]

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
        except (RuntimeError, ValueError, MemoryError, IndexError) as error:
            out.failures[sequence] = error
            return None
