"""A prefill in chunks, outside of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import KVSpan
from gemserve.model.query_tap import QueryTap

_CHUNK_TOKENS = 512


def prefill(
    model: CausalModel,
    ids: Sequence[int],
    *,
    kv: KVSpan,
    rope_tokens: int,
    query_tap: QueryTap,
) -> torch.Tensor:
    """Run all layers on a prompt. Returns the last logits: [1, vocab].

    `kv` gets the keys and values, and `query_tap` the queries it collects. `rope_tokens`: see
    `CausalModel.prefill_chunk`.
    """
    logits = torch.empty(0, model.vocab_size)
    for low in range(0, len(ids), _CHUNK_TOKENS):
        chunk = ids[low : low + _CHUNK_TOKENS]
        is_last = low + len(chunk) == len(ids)
        last = model.prefill_chunk(
            chunk,
            start=low,
            kv=kv,
            rope_tokens=rope_tokens,
            is_last=is_last,
            query_tap=query_tap,
        )
        if last is not None:
            logits = last
    return logits
