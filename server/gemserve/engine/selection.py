"""Chooses what a filter method keeps, from what the filter pass has collected."""

from __future__ import annotations

from gemserve.engine.sequence import Sequence
from gemserve.filtering.methods import selector_of
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
    choice = selector_of(method).choose(evidence, plan.budget, request.filter)
    count, budget = len(choice.positions), plan.budget
    if not (min(budget.low, budget.high) <= count <= budget.limit):
        raise ValueError(f"{method} kept {count} tokens of a budget of {budget}")
    return choice
