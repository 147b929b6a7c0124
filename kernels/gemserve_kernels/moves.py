"""Keys and values on their way into memory, and from one place in it to another."""

from __future__ import annotations

import torch

from gemserve_kernels.spans import Spans


def gather_tokens(source: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
    """Copy the chosen positions [layers, kv_heads, kept] of `source` to 0..kept−1 of `target`.

    `source`, `target`: [at least that many layers, 2 (keys, values), kv_heads, tokens, head_dim],
    of one dtype; they may be views of one memory, but must not overlap.
    """
    layers, _, kept = chosen.shape
    index = chosen.unsqueeze(-1).expand(-1, -1, -1, source.shape[-1])
    for layer in range(layers):
        for side in (0, 1):
            target[layer, side, :, :kept] = source[layer, side].gather(1, index[layer])


def write_tokens(spans: Spans, key: torch.Tensor, value: torch.Tensor, *, layer: int) -> None:
    """Store each sequence's newest key and value, [kv_heads, sequences, head_dim], as its last.

    `spans` already counts them in its lengths; an empty sequence has none, and nothing of it is
    stored.
    """
    heads = torch.arange(spans.kv_heads, device=key.device)
    for index, place in enumerate(spans.table.tolist()):
        first, to_head, to_value, to_layer, length = place
        if length > 0:
            at = first + layer * to_layer + heads * to_head + length - 1  # [kv_heads]
            spans.rows[at] = key[:, index]
            spans.rows[at + to_value] = value[:, index]
