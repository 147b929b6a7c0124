"""One request from prompt to last token, as a generator of events: filter, prefill, decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemserve.config import EngineConfig
from gemserve.engine.sampling import Sampler
from gemserve.engine.text import TextStream
from gemserve.filtering.selector import Evidence
from gemserve.filtering.table import SELECTORS
from gemserve.model.causal import CausalModel
from gemserve.model.seam import FilterTap
from gemserve.types import (
    Event,
    Filtered,
    FilterReport,
    Finished,
    FinishReason,
    Request,
    TextDelta,
)


class Cancelled(Exception):
    """The client has gone; unwinds to the worker, which ends the request."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens the answer is generated from. `positions` None: all of the prompt."""

    ids: Sequence[int]
    positions: tuple[int, ...] | None
    report: FilterReport
    kv_bytes: int  # held while filtering


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What every request is run with; holds nothing about any of them."""

    model: CausalModel
    tokenizer: Any
    config: EngineConfig
    eos_ids: frozenset[int]

    def run(self, request: Request, is_cancelled: Callable[[], bool]) -> Iterator[Event]:
        """All events of a request, the last one `Finished`. Raises `Cancelled`."""
        started_s = time.monotonic()
        selection = self.select(request, is_cancelled)
        filtered_s = time.monotonic()
        yield Filtered(report=selection.report, started_s=started_s, filtered_s=filtered_s)
        yield from self._generate(request, selection, is_cancelled)

    def select(self, request: Request, is_cancelled: Callable[[], bool]) -> Selection:
        """Filter the prompt, or explain in the report why not."""
        params, num_tokens = request.filter, len(request.prompt_ids)
        keep = params.kept_count(num_tokens)
        if params.method == "none":
            return self._whole_prompt(request, "disabled")
        if num_tokens <= self.config.filter_min_tokens or num_tokens <= keep:
            return self._whole_prompt(request, "short_prompt")

        started_s = time.monotonic()
        layer = params.layer if params.layer is not None else self.config.filter_layer
        assert layer is not None
        selector = SELECTORS[params.method]
        tap = FilterTap(layer=layer, num_tokens=num_tokens, window=selector.window(num_tokens))
        kv = self.model.new_kv(num_layers=layer, capacity=num_tokens)
        for start, ids in self._chunks(request.prompt_ids, is_cancelled):
            self.model.filter_chunk(ids, start=start, kv=kv, tap=tap)
        assert tap.queries is not None
        assert tap.keys is not None
        evidence = Evidence(
            queries=tap.queries,
            keys=tap.keys,
            scale=tap.scale,
            softcap=tap.softcap,
            protected=request.protected,
        )
        with torch.inference_mode():
            positions = tuple(selector.select(evidence, keep, params).tolist())
        report = FilterReport(
            method=params.method,
            applied=True,
            reason=None,
            layer=layer,
            prompt_tokens=num_tokens,
            kept_tokens=len(positions),
            cached_tokens=0,
            filter_ms=(time.monotonic() - started_s) * 1e3,
            selection=as_ranges(positions) if params.return_selection else None,
        )
        ids = [request.prompt_ids[p] for p in positions]
        return Selection(ids, positions, report, kv.num_bytes + tap.num_bytes)

    def _whole_prompt(self, request: Request, reason: Any) -> Selection:
        num_tokens = len(request.prompt_ids)
        report = FilterReport(
            method=request.filter.method,
            applied=False,
            reason=reason,
            layer=None,
            prompt_tokens=num_tokens,
            kept_tokens=num_tokens,
            cached_tokens=0,
            filter_ms=0.0,
            selection=((0, num_tokens),) if request.filter.return_selection else None,
        )
        return Selection(request.prompt_ids, None, report, 0)

    def _generate(
        self, request: Request, selection: Selection, is_cancelled: Callable[[], bool]
    ) -> Iterator[Event]:
        sampling = request.sampling
        total = len(selection.ids) + sampling.max_tokens
        kv = self.model.new_kv(num_layers=self.model.num_layers, capacity=total)
        logits: torch.Tensor | None = None
        for start, ids in self._chunks(selection.ids, is_cancelled):
            is_last = start + len(ids) == len(selection.ids)
            logits = self.model.chunk(ids, start=start, kv=kv, rope_tokens=total, is_last=is_last)

        sampler, text = Sampler(sampling), TextStream(self.tokenizer, sampling.stop)
        reason: FinishReason = "length"
        num_drawn = 0
        while num_drawn < sampling.max_tokens:
            if is_cancelled():
                raise Cancelled
            assert logits is not None
            token = sampler.draw(logits)
            num_drawn += 1
            if token in self.eos_ids and not sampling.ignore_eos:
                reason = "stop"
                yield TextDelta(text="", token_ids=(token,), drawn_s=time.monotonic())
                break
            new_text = text.push(token)
            yield TextDelta(text=new_text, token_ids=(token,), drawn_s=time.monotonic())
            if text.is_stopped:
                reason = "stop"
                break
            if num_drawn < sampling.max_tokens:
                position = len(selection.ids) + num_drawn - 1
                logits = self.model.chunk(
                    [token], start=position, kv=kv, rope_tokens=total, is_last=True
                )
        rest = text.flush()
        if text.is_stopped:
            reason = "stop"
        if rest:
            yield TextDelta(text=rest, token_ids=(), drawn_s=time.monotonic())
        yield Finished(
            reason=reason,
            completion_tokens=num_drawn,
            peak_kv_bytes=max(selection.kv_bytes, kv.num_bytes),
            decode_kv_bytes=kv.num_bytes,
        )

    def _chunks(
        self, ids: Sequence[int], is_cancelled: Callable[[], bool]
    ) -> Iterator[tuple[int, Sequence[int]]]:
        size = self.config.chunk_tokens
        for start in range(0, len(ids), size):
            if is_cancelled():
                raise Cancelled
            yield start, ids[start : start + size]


def as_ranges(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)
