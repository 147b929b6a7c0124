"""One query of each of several sequences against its keys and values, where they lie."""

from __future__ import annotations

import torch

from gemserve_kernels.attention import Partial, reference_attention
from gemserve_kernels.kv_table import Spans


def decode_attention(
    query: torch.Tensor,
    spans: Spans,
    *,
    layer: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Partial:
    """Attend `query` [sequences, heads, head_dim] to each sequence's tokens: a part of attention.

    The query stands at its sequence's last token and sees all of them, or the last `window`. Of the
    part returned, `out` is [heads, sequences, head_dim], a view, contiguous as [sequences, heads,
    head_dim], in the dtype of `query`, and `lse` is [heads, sequences], float32. An empty sequence
    contributes nothing: 0, with a log-sum-exp of −inf.
    """
    sequences, heads, head_dim = query.shape
    assert sequences == spans.num_sequences
    out = torch.zeros(sequences, heads, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.full((sequences, heads), -torch.inf, device=query.device)
    key_heads = torch.arange(spans.kv_heads, device=query.device)[:, None]
    for index, place in enumerate(spans.places):
        first, to_head, to_value, to_layer, length = place
        if length == 0:
            continue
        start = 0 if window is None else max(0, length - window)
        tokens = torch.arange(start, length, device=query.device)
        at = first + layer * to_layer + key_heads * to_head + tokens  # [kv_heads, tokens]
        part = reference_attention(
            query[index].unsqueeze(1),
            spans.rows[at],
            spans.rows[at + to_value],
            scale=scale,
            softcap=softcap,
        )
        out[index], lse[index] = part.out[:, 0], part.lse[:, 0]
    return Partial(out.transpose(0, 1), lse.T)
