"""Evicts keys and values of a prompt that all layers have read."""

from __future__ import annotations

import torch

from gemserve.filtering.snapkv import SnapKV
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import QueryTap
from gemserve_kernels import Backend


def evict(
    evictor: SnapKV,
    query_tap: QueryTap,
    source: KVSpan,
    num_tokens: int,
    keep: int,
    target: KVSpan,
    backend: Backend,
) -> None:
    """Pack the positions that `evictor` keeps into slots 0..keep−1 of `target`, layer by layer.

    `query_tap` has the queries of all layers, from a pass over the whole prompt of `num_tokens`
    tokens. `keep` is below that. Both spans may begin at the same place in memory.
    """
    chosen = torch.stack(
        [
            evictor.select(
                queries,
                source.read(layer, num_tokens)[0],
                keep,
                backend,
                scale=query_tap.scales[layer],
                softcap=query_tap.softcaps[layer],
            )
            for layer, queries in enumerate(query_tap.queries)
        ]
    )
    target.pack(source, chosen, backend)
