"""Chooses what a filter method keeps, from what the filter pass has collected."""

from __future__ import annotations

from gemserve.cost import ModelShape
from gemserve.engine.sequence.step_plan import Kept
from gemserve.filtering.methods import selector_of
from gemserve.filtering.score_report import report_scores
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import KVSpan
from gemserve.model.query_tap import FilterTap
from gemserve.types import Request


def choose_positions(
    request: Request, kv: KVSpan, tap: FilterTap, num_cached: int, model: CausalModel
) -> Kept:
    """The positions that the request's method keeps. Raises `ValueError` for a bad choice.

    `kv` and `tap` are those of the filter pass, which has taken over `num_cached` tokens.
    """
    plan = request.plan
    assert plan is not None
    queries, num_read = tap.queries, tap.num_tokens
    rope_tokens = num_read + request.adapter_positions
    evidence = Evidence(
        num_tokens=len(request.prompt_ids),
        layers={
            layer: LayerEvidence(
                queries=queries.of(layer),
                keys=kv.keys(layer, num_read),
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
    )
    method = request.filter.method
    selector = selector_of(method)
    choice = selector.choose(evidence, plan.budget, request.filter)
    count, budget = len(choice.positions), plan.budget
    if not (min(budget.low, budget.high) <= count <= budget.limit):
        raise ValueError(f"{method} kept {count} tokens of a budget of {budget}")
    scores = None
    if request.filter.return_scores and choice.scores is not None:
        ratio = _whole_ratio(model.shape, len(request.prompt_ids), num_cached, num_read, tap.layer)
        scores = report_scores(choice.scores, selector, evidence, budget, request.filter, ratio)
    return Kept(
        positions=choice.positions.tolist(),
        coverage=choice.coverage,
        is_diffuse=choice.is_diffuse,
        scores=scores,
    )


def _whole_ratio(
    shape: ModelShape, num_prompt: int, num_cached: int, num_read: int, layer: int
) -> float:
    """FLOPs of reading the whole prompt, over those of the filter pass."""
    whole = shape.prefill_chunk(0, num_prompt) + shape.head()
    return whole / max(1.0, shape.filter_chunk(num_cached, num_read - num_cached, layer))
