"""Copies keys and values: new ones into memory, and chosen ones to another place."""

from __future__ import annotations

import torch

from gemserve_kernels.kv_table import KVTable


def gather_tokens(source: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
    """Copy the chosen positions [layers, kv_heads, kept] of `source` to 0..kept−1 of `target`.

    `source`, `target`: [at least that many layers, 2 (keys, values), kv_heads, tokens, head_dim],
    of one dtype. They may be views of the same memory but must not overlap.
    """
    layers, _, kept = chosen.shape
    index = chosen.unsqueeze(-1).expand(-1, -1, -1, source.shape[-1])
    for layer in range(layers):
        for side in (0, 1):
            target[layer, side, :, :kept] = source[layer, side].gather(1, index[layer])


def write_tokens(kv: KVTable, key: torch.Tensor, value: torch.Tensor, *, layer: int) -> None:
    """Store the newest key and value of each sequence in its last place.

    `key`, `value`: [kv_heads, sequences, head_dim]. The lengths in `kv` already count the new
    token. Nothing is stored for an empty sequence.
    """
    rows = kv.newest + layer * kv.table[:, 3:4]  # [sequences, kv_heads]
    of_values = rows + kv.table[:, 2:3]
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if any(place[4] == 0 for place in kv.places):
        filled = kv.table[:, 4] > 0
        rows, of_values, key, value = (t[filled] for t in (rows, of_values, key, value))
    kv.rows[rows] = key
    kv.rows[of_values] = value
