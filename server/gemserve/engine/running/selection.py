"""Chooses what a filter method keeps, from what the filter pass has collected."""

from __future__ import annotations

from dataclasses import replace

from gemserve.cost import ModelShape
from gemserve.engine.sequence.sequence import Sequence
from gemserve.filtering.methods import selector_of
from gemserve.filtering.score_report import report_scores
from gemserve.filtering.selector import Choice, Evidence, LayerEvidence
from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import Memory
from gemserve.model.query_tap import FilterTap


def choose_positions(
    sequence: Sequence, tap: FilterTap, memory: Memory, model: CausalModel
) -> Choice:
    """The positions that the sequence's method keeps. Raises `ValueError` for a bad choice."""
    request, plan = sequence.request, sequence.plan
    num_read = sequence.num_read
    kv = memory.kv(sequence.memory.start, num_layers=tap.layer, capacity=num_read)
    queries, rope_tokens = tap.queries, num_read + request.adapter_positions
    evidence = Evidence(
        num_tokens=sequence.num_prompt,
        layers={
            layer: LayerEvidence(
                queries=queries.of(layer),
                keys=tap.keys if layer == tap.layer else kv.read(layer, num_read)[0],
                scale=queries.scales[layer],
                softcap=queries.softcaps[layer],
                move_keys=model.key_mover(layer, rope_tokens),
            )
            for layer in queries.layers
        },
        rows=queries.rows,
        backend=model.backend,
        protected=request.protected,
        breaks=request.breaks,
        heads=plan.heads,
        coverage_bound=plan.coverage_bound,
    )
    method = request.filter.method
    selector = selector_of(method)
    choice = selector.choose(evidence, plan.budget, request.filter)
    count, budget = len(choice.positions), plan.budget
    if not (min(budget.low, budget.high) <= count <= budget.limit):
        raise ValueError(f"{method} kept {count} tokens of a budget of {budget}")
    report = None
    if request.filter.return_scores and choice.scores is not None:
        ratio = _whole_ratio(sequence, tap.layer, model.shape)
        report = report_scores(choice.scores, selector, evidence, budget, request.filter, ratio)
    return replace(choice, scores=None, report=report)


def _whole_ratio(sequence: Sequence, layer: int, shape: ModelShape) -> float:
    """FLOPs of reading the whole prompt, over those of the filter pass."""
    whole = shape.prefill_chunk(0, sequence.num_prompt) + shape.head()
    cached = sequence.num_cached
    return whole / max(1.0, shape.filter_chunk(cached, sequence.num_read - cached, layer))
