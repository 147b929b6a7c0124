"""The vectors by which segments are found again: keys of their tokens, and queries of a question.

Attention depends on the distance between the two, which is not known when a segment is read. So its
keys are moved to position 0, and the queries of the question to one fixed distance behind it.
Layers whose keys cannot be moved keep them as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from gemserve.contract.filter_options import Heads
from gemserve.contract.filter_plan import FilterPlan, QueriesRead, key_heads
from gemserve.engine.running.lockstep import Lockstep
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import FilterTap

DISTANCE = 128  # positions between the tokens of all segments and the question


def keys_at_origin(
    model: CausalModel,
    heads: Heads,
    keys_of: Callable[[int], torch.Tensor],
    positions: range,
) -> npt.NDArray[np.float32]:
    """Keys of the tokens at `positions`, as if each stood at position 0.

    `keys_of`: the keys of a layer, [kv_heads, tokens, head_dim]. Returns [key heads, tokens,
    head_dim].
    """
    pairs = _key_heads(model, heads)
    layers = {layer: keys_of(layer) for layer in sorted({layer for layer, _ in pairs})}
    back = torch.arange(positions.start, positions.stop, device=model.device)
    found = []
    for layer, head in pairs:
        keys = layers[layer][head : head + 1, positions.start : positions.stop]
        found.append(_moved(model, layer, keys, -back, positions.stop))
    return torch.cat(found).cpu().numpy()


def question_queries(
    plan: FilterPlan, kv: KVSpan, tap: FilterTap, model: CausalModel, lockstep: Lockstep
) -> QueriesRead:
    """The queries of a pass over an anchor and a question, whose rows are the plan's."""
    assert plan.heads is not None
    rows, num_read, num_sinks = plan.rows, tap.num_tokens, plan.num_sinks
    queries, sinks = [], []
    layers = {
        layer: (
            lockstep.all_heads(tap.queries.of(layer)),
            lockstep.all_heads(kv.keys(layer, num_read)),
        )
        for layer in sorted({layer for layer, _ in plan.heads})
    }
    behind = torch.arange(len(rows), device=model.device)
    positions = torch.tensor(rows, device=model.device)
    for layer, head in plan.heads:
        every, keys = layers[layer]
        scale, softcap = tap.queries.scales[layer], tap.queries.softcaps[layer]
        query = every[head : head + 1] * scale  # [1, rows, head_dim]
        further = _moved(model, layer, query, torch.full_like(behind, DISTANCE), num_read)
        key = keys[head * keys.shape[0] // every.shape[0], :num_sinks].float()
        sinks.append(_capped(further[0] @ key.T, softcap).logsumexp(-1))
        queries.append(_moved(model, layer, query, DISTANCE + behind - positions, num_read)[0])
    return QueriesRead(
        queries=torch.stack(queries).cpu().numpy(),
        sinks=torch.stack(sinks).cpu().numpy(),
        softcaps=tuple(tap.queries.softcaps[layer] for layer, _ in plan.heads),
    )


def _key_heads(model: CausalModel, heads: Heads) -> tuple[tuple[int, int], ...]:
    shape = model.shape
    return key_heads(heads, shape.num_heads, shape.num_kv_heads)


def _moved(
    model: CausalModel, layer: int, vectors: torch.Tensor, shifts: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Vectors [heads, tokens, head_dim] that many positions [tokens] further on, float32."""
    mover = model.key_mover(layer, num_tokens)
    return vectors.float() if mover is None else mover(vectors, shifts)


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
