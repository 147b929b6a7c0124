"""What an evictor leaves of a prompt that all layers have read."""

from __future__ import annotations

import torch

from gemserve.filtering.snapkv import SnapKV
from gemserve.model.kv import KVSpan
from gemserve.model.query_tap import QueryTap
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
    """Pack into `target`, as 0..keep−1, what `evictor` chooses in each layer of `source`.

    `query_tap` has listened to the whole prompt of `num_tokens` in all layers; `keep` is below
    that. The spans may begin at the same place in memory.
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
