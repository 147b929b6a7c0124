"""Reads a group of segments, and keeps of each what the question looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.contract.filter_plan import FilterPlan, KeysRead, SegmentPlan
from gemserve.contract.requests import Request
from gemserve.cost import filter_units
from gemserve.engine.memory import KVPlace
from gemserve.engine.running.index_vectors import keys_at_origin
from gemserve.engine.running.lockstep import Lockstep
from gemserve.engine.running.pool_bytes import pass_kv
from gemserve.engine.sequence.segment_pass import SegmentRead
from gemserve.engine.sequence.step_plan import Chunk
from gemserve.filtering.methods import selector_of
from gemserve.filtering.segment_scores import SegmentSummary
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.adapter import Adapter
from gemserve.model.passes.attention import Breaks
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import KVSpan, Memory
from gemserve.model.passes.query_tap import FilterTap
from gemserve.model.passes.recurrent_state import SequenceState

# no attention is cut into pieces: the numbers must not depend on how fast the machine is just now
_WHOLE = 1 << 62


class ArrivedGroup:
    """A group that another engine has read. It stands for a `SegmentGroup`."""

    def __init__(self, request: Request, chunk: Chunk, device: torch.device) -> None:
        assert request.plan is not None
        assert request.plan.segments is not None
        self._segments, self._arrived = request.plan.segments.segments, chunk.arrived
        self._device = device

    def forward(self, breaks: Breaks) -> None:
        """Nothing is left to read."""

    def evidence(self, lockstep: Lockstep) -> list[Evidence]:
        return []

    def summaries(self, evidence: Sequence[Evidence]) -> dict[int, SegmentSummary]:
        return {
            index: SegmentSummary.of_arrays(arrays, self._segments[index].start, self._device)
            for index, arrays in self._arrived
        }


class SegmentGroup:
    """The segments of one chunk: a pass over them, and then what it showed."""

    def __init__(
        self,
        request: Request,
        chunk: Chunk,
        model: CausalModel,
        memory: Memory,
        adapter: Adapter,
        state: SequenceState | None,
    ) -> None:
        """`state`: a place for a recurrent state, if the model keeps one."""
        assert request.plan is not None
        assert request.plan.segments is not None
        assert request.plan.layer is not None
        self._request, self._model, self._adapter = request, model, adapter
        self._plan: FilterPlan = request.plan
        self._segments: SegmentPlan = request.plan.segments
        self._layer, self._state = request.plan.layer, state
        self._reads, self._memory = chunk.segments, memory
        longest = max(read.text.count for read in chunk.segments) + len(self._segments.asked)
        num_asked = len(self._segments.asked)
        rows = [i * num_asked + row for i in range(len(chunk.segments)) for row in self._plan.rows]
        queries = model.new_query_tap(self._plan.tapped, rows)
        self._tap = FilterTap(layer=self._layer, queries=queries, num_tokens=longest)

    def forward(self, breaks: Breaks) -> None:
        """Read the segments that are not cached, then what is asked behind all of them.

        A CPU reads one segment after the other, so that what is computed of one does not depend on
        the others; a GPU reads them in one pass, because its kernels want many rows. With a
        recurrent state it is asked behind each segment as soon as that is read, because there is
        one such state.
        """
        breaks = Breaks(breaks.pause, _WHOLE)
        nothing = FilterTap(
            layer=self._layer,
            queries=self._model.new_query_tap((), ()),
            num_tokens=self._tap.num_tokens,
        )
        assert self._state is None or not any(read.is_cached for read in self._reads)
        unread = [read for read in self._reads if not read.is_cached]
        if self._model.reads_together and unread:
            texts = [(self._text(read), self._text_kv(read)) for read in unread]
            self._model.filter_together(texts, tap=nothing, adapter=self._adapter, breaks=breaks)
            unread = []
        for number, read in enumerate(unread):
            self._model.filter_chunk(
                self._text(read),
                start=0,
                kv=self._text_kv(read),
                tap=nothing,
                adapter=self._adapter,
                breaks=breaks,
                state=self._state,
            )
            if self._state is not None and self._segments.asked:
                self._ask([read], breaks, number)
        if self._state is None and self._segments.asked:
            self._ask(self._reads, breaks)

    def _text(self, read: SegmentRead) -> list[int]:
        """The tokens of a segment, behind its anchor."""
        segment = self._segments.segments[read.index]
        return [
            *self._segments.anchor,
            *self._request.prompt_ids[segment.start : segment.stop],
        ]

    def _text_kv(self, read: SegmentRead) -> KVSpan:
        return self._kv(KVPlace(read.text.start, read.text.capacity))

    def _ask(self, reads: Sequence[SegmentRead], breaks: Breaks, num_before: int = 0) -> None:
        self._model.ask_segments(
            self._segments.asked,
            segments=[(self._asked_kv(read), read.text.count) for read in reads],
            tap=self._tap,
            adapter=self._adapter,
            breaks=breaks,
            num_before=num_before,
            state=self._state,
        )

    def evidence(self, lockstep: Lockstep) -> list[Evidence]:
        """What the pass has shown of each segment. With ranks, only rank 0 has all heads."""
        return [self._evidence(i, read, lockstep) for i, read in enumerate(self._reads)]

    def keys(self, lockstep: Lockstep) -> KeysRead:
        """The keys of each segment's tokens in the heads that find facts, moved to position 0."""
        assert self._plan.heads is not None
        first = len(self._segments.anchor)
        return KeysRead(
            segments=tuple(
                keys_at_origin(
                    self._model,
                    self._plan.heads,
                    lambda layer, read=read: lockstep.all_heads(  # type: ignore[misc]
                        self._asked_kv(read).keys(layer, read.text.count)
                    ),
                    range(first, read.text.count),
                )
                for read in self._reads
            )
        )

    def summaries(self, evidence: Sequence[Evidence]) -> dict[int, SegmentSummary]:
        """What the choice needs to know of each segment, by index."""
        selector, num_sinks = selector_of(self._request.filter.method), len(self._segments.anchor)
        starts = [self._segments.segments[read.index].start for read in self._reads]
        return {
            read.index: selector.summarize_segment(of_segment, num_sinks, start)
            for of_segment, read, start in zip(evidence, self._reads, starts, strict=True)
        }

    def _evidence(self, number: int, read: SegmentRead, lockstep: Lockstep) -> Evidence:
        queries, kv, count = self._tap.queries, self._asked_kv(read), len(self._plan.rows)
        of_segment = slice(number * count, (number + 1) * count)
        return Evidence(
            num_tokens=read.text.count,
            protected=(),
            layers={
                layer: LayerEvidence(
                    queries=lockstep.all_heads(queries.of(layer)[:, of_segment]),
                    keys=lockstep.all_heads(kv.keys(layer, read.text.count)),
                    scale=queries.scales[layer],
                    softcap=queries.softcaps[layer],
                )
                for layer in queries.layers
            },
            rows=[read.text.count + row for row in self._plan.rows],
            backend=self._model.backend,
            heads=self._plan.heads,
            num_asked=self._plan.num_asked,
        )

    def _asked_kv(self, read: SegmentRead) -> KVSpan:
        return self._kv(KVPlace(read.asked, len(self._segments.asked), (read.text,)))

    def _kv(self, place: KVPlace) -> KVSpan:
        return pass_kv(place, filter_units(self._plan.num_below), self._memory)
