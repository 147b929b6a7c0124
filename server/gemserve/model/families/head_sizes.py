"""Gives a layer's queries, keys and values the head sizes of the KV memory, which all layers share.

Some layers have other sizes: multi-head latent attention (MLA) has values that are smaller than its
keys, and Gemma 4 has fewer and larger key heads in the layers that see all tokens. Zeros at the end
of queries and keys change no score, zeros at the end of values are cut off again, and a key head
that is stored several times serves fewer query heads each time. So the results are the layer's own.
The price is memory: see `ModelShape`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def find_misfit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_heads: int, head_dim: int
) -> str | None:
    """Why a layer's heads do not fit into memory of `kv_heads` heads of `head_dim`, or None.

    All three are [batch, heads, tokens, numbers].
    """
    heads, own, size = query.shape[1], key.shape[1], key.shape[-1]
    where = f"the KV memory is for {kv_heads} of {head_dim} in all layers"
    if query.shape[-1] != size or value.shape[1] != own:
        return (
            f"has {heads} query heads of {query.shape[-1]} numbers, {own} key heads of {size} and "
            f"{value.shape[1]} value heads: queries and keys must be of one size, and keys and "
            "values equally many"
        )
    if max(size, value.shape[-1]) > head_dim:
        return f"has {own} key heads of {size} and values of {value.shape[-1]} numbers; {where}"
    if kv_heads % own or heads % kv_heads:
        return f"has {own} key heads for {heads} query heads; {where}"
    return None


def fit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [heads, tokens, head_dim], keys and values [kv_heads, tokens, head_dim].

    All three are [heads, tokens, numbers] of the layer.
    """
    query, key, value = (_widened(x, head_dim) for x in (query, key, value))
    if key.shape[0] == kv_heads:
        return query, key, value
    times = kv_heads // key.shape[0]
    return query, key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)


def _widened(numbers: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - numbers.shape[-1]
    return pad(numbers, (0, missing)) if missing else numbers
