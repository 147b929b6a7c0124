"""Chooses what a filter method keeps, from what the filter pass has collected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.contract.prompt_parts import NO_SEPARATORS, Separators, TokenArray
from gemserve.contract.requests import Request
from gemserve.cost import ModelShape
from gemserve.engine.running.lockstep import Lockstep
from gemserve.engine.sequence.step_plan import Chunk, Kept
from gemserve.filtering.joined_text import join_text
from gemserve.filtering.methods import selector_of
from gemserve.filtering.score_report import report_scores
from gemserve.filtering.segment_scores import SegmentSummary, pooled_scores
from gemserve.filtering.selector import (
    Evidence,
    LayerEvidence,
    PromptEvidence,
    SegmentEvidence,
)
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import FilterTap


def prompt_evidence(
    request: Request,
    kv: KVSpan,
    tap: FilterTap,
    model: CausalModel,
    lockstep: Lockstep,
) -> Evidence:
    """What a filter pass has collected in `kv` and `tap`. With ranks, only rank 0 has all heads."""
    plan = request.plan
    assert plan is not None
    queries, num_read = tap.queries, tap.num_tokens
    rope_tokens = num_read + request.adapter_positions
    return Evidence(
        num_tokens=len(request.prompt_ids),
        layers={
            layer: LayerEvidence(
                queries=lockstep.all_heads(queries.of(layer)),
                keys=lockstep.all_heads(kv.keys(layer, num_read)),
                scale=queries.scales[layer],
                softcap=queries.softcaps[layer],
                move_keys=model.key_mover(layer, rope_tokens),
            )
            for layer in queries.layers
        },
        rows=queries.rows,
        num_asked=plan.num_asked,
        backend=model.backend,
        protected=request.protected,
        breaks=request.breaks,
        heads=plan.heads,
        coverage_bound=plan.coverage_bound,
        words=_words(request),
        separators=_separators(request),
    )


def choose_positions(
    request: Request, evidence: Evidence, tap: FilterTap, num_cached: int, model: CausalModel
) -> Kept:
    """The positions that the request's method keeps. Raises `ValueError` for a bad choice.

    `tap` is that of the filter pass, which has taken over `num_cached` tokens.
    """
    reading = model.shape.filter_chunk(num_cached, tap.num_tokens - num_cached, tap.layer)
    return _chosen(request, evidence, reading, model.shape)


def choose_from_segments(
    request: Request,
    segments: Sequence[SegmentSummary],
    chunk: Chunk,
    model: CausalModel,
) -> Kept:
    """The same from what was kept of all segments. `chunk`: the last one of the pass."""
    plan = request.plan
    assert plan is not None
    assert plan.segments is not None
    assert plan.layer is not None
    num_tokens = len(request.prompt_ids)
    shares = torch.zeros(2, num_tokens, device=model.device)
    for segment, summary in zip(plan.segments.segments, segments, strict=True):
        shares[:, segment.start : segment.stop] = summary.shares
    evidence = SegmentEvidence(
        num_tokens=num_tokens,
        scores=pooled_scores(segments, num_tokens),
        shares=shares,
        protected=request.protected,
        breaks=request.breaks,
        coverage_bound=plan.coverage_bound,
        words=_words(request),
        separators=_separators(request),
    )
    shape, size = model.shape, plan.segments.size
    num_read = plan.segments.num_tokens - chunk.num_cached
    reading = shape.filter_chunk(0, size, plan.layer) * num_read / size
    return _chosen(request, evidence, reading, shape)


def _chosen(request: Request, evidence: PromptEvidence, reading: float, shape: ModelShape) -> Kept:
    """What the request's method chooses. `reading`: FLOPs of the filter pass."""
    plan = request.plan
    assert plan is not None
    method = request.filter.method
    selector = selector_of(method)
    choice = selector.choose(evidence, plan.budget, request.filter)
    positions, budget = choice.positions.tolist(), plan.budget
    joined = join_text(request.tokens, positions, evidence.gaps)
    # whole passages may leave a part of the budget empty
    least = max(1, budget.protected) if selector.keeps_passages else min(budget.low, budget.high)
    if not (least <= len(joined.ids) <= budget.limit):
        raise ValueError(f"{method} kept {len(joined.ids)} tokens of a budget of {budget}")
    scores = None
    if request.filter.return_scores and choice.scores is not None:
        # FLOPs of reading the whole prompt, over those of the filter pass
        whole = shape.prefill_chunk(0, len(request.prompt_ids)) + shape.head()
        ratio = whole / max(1.0, reading)
        scores = report_scores(choice.scores, selector, evidence, budget, request.filter, ratio)
    return Kept(
        positions=positions,
        ids=joined.ids,
        added=joined.added,
        coverage=choice.coverage,
        is_diffuse=choice.is_diffuse,
        scores=scores,
        best=choice.best,
    )


def _words(request: Request) -> tuple[TokenArray, ...]:
    return request.words if request.filter.lexical == "auto" else ()


def _separators(request: Request) -> Separators:
    """Only what keeps whole passages separates them."""
    keeps_passages = selector_of(request.filter.method).keeps_passages
    return request.separators if keeps_passages else NO_SEPARATORS
