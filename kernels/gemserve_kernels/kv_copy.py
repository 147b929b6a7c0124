"""Keys and values on their way into memory, and from one place in it to another."""

from __future__ import annotations

import torch

from gemserve_kernels.kv_table import Spans


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
    rows = spans.newest + layer * spans.table[:, 3:4]  # [sequences, kv_heads]
    of_values = rows + spans.table[:, 2:3]
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if any(place[4] == 0 for place in spans.places):
        filled = spans.table[:, 4] > 0
        rows, of_values, key, value = (t[filled] for t in (rows, of_values, key, value))
    spans.rows[rows] = key
    spans.rows[of_values] = value
