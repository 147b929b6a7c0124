"""Attention in a decode step: one query for each of several sequences.

Keys and values are read where they are in memory.
"""

from __future__ import annotations

import torch

from gemserve_kernels.attention import Partial, reference_attention
from gemserve_kernels.kv_table import KVTable


def decode_attention(
    query: torch.Tensor,
    kv: KVTable,
    *,
    layer: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Partial:
    """Attend `query` [sequences, heads, head_dim] to the tokens of each query's sequence.

    The query is at its sequence's last token and sees all of its tokens, or the last `window`.
    Returns a `Partial` whose `out` is [heads, sequences, head_dim] in the dtype of `query`, a view
    that is contiguous as [sequences, heads, head_dim], and whose `lse` is [heads, sequences],
    float32. An empty sequence gets 0, with a log-sum-exp of −inf.
    """
    sequences, heads, head_dim = query.shape
    assert sequences == kv.num_sequences
    out = torch.zeros(sequences, heads, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.full((sequences, heads), -torch.inf, device=query.device)
    key_heads = torch.arange(kv.kv_heads, device=query.device)[:, None]
    for index, place in enumerate(kv.places):
        first, to_head, to_value, to_layer, length = place
        if length == 0:
            continue
        start = 0 if window is None else max(0, length - window)
        tokens = torch.arange(start, length, device=query.device)
        at = first + layer * to_layer + key_heads * to_head + tokens  # [kv_heads, tokens]
        part = reference_attention(
            query[index].unsqueeze(1),
            kv.rows[at],
            kv.rows[at + to_value],
            scale=scale,
            softcap=softcap,
        )
        out[index], lse[index] = part.out[:, 0], part.lse[:, 0]
    return Partial(out.transpose(0, 1), lse.T)


def fused_decode_attention(
    query: torch.Tensor,
    kv: KVTable,
    *,
    layer: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Partial:
    """See `decode_attention`. Calls torch's fused CPU kernel for one sequence after the other.

    That kernel has no soft cap, so soft-capped layers take the plain form.
    """
    if softcap is not None:
        return decode_attention(query, kv, layer=layer, scale=scale, softcap=softcap, window=window)
    sequences, heads, head_dim = query.shape
    kv_heads, rows = kv.kv_heads, kv.rows
    # a group's query heads are the rows of one small product, so that each key is read once
    grouped = query.reshape(sequences, 1, kv_heads, heads // kv_heads, head_dim)
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for q, place in zip(grouped, kv.places, strict=True):
        first, to_head, to_value, to_layer, length = place
        seen = length if window is None else min(window, length)
        if seen == 0:  # an empty sequence would make the kernel kill the process
            outs.append(torch.zeros_like(q))
            lses.append(torch.full(q.shape[:-1], -torch.inf))
            continue
        size, steps = (1, kv_heads, seen, head_dim), (0, to_head * head_dim, head_dim, 1)
        start = first + layer * to_layer + length - seen
        k, v = (
            rows.as_strided(size, steps, rows.storage_offset() + row * head_dim)
            for row in (start, start + to_value)
        )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, scale=scale
        )
        outs.append(out)
        lses.append(lse)
    joined = torch.cat(outs).reshape(sequences, heads, head_dim)
    return Partial(joined.transpose(0, 1), torch.cat(lses).reshape(sequences, heads).T)
