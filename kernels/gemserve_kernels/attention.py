"""Attention as parts joined by their log-sum-exp.

What a token attends to is a list of parts: its sequence's past, the causal chunk that it arrives
in, and perhaps an adapter's term. Each part is evaluated alone and gives a `Partial`. `merge` joins
the parts exactly. The causal case never builds a [queries × keys] mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Partial:
    """What one part adds: e^lse · out to the numerator, e^lse · mass to the denominator.

    `out`: [heads, queries, head_dim]; for keys and values, the softmax over this part's keys, times
    its values. `lse`: [heads, queries], float32; natural log-sum-exp of this part's scaled scores.
    `mass`: [heads, queries], float32; None stands for 1, which is right for keys and values.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor | None = None


def merge(parts: Sequence[Partial]) -> torch.Tensor:
    """Join the parts of one attention: [heads, queries, head_dim] in the first part's dtype.

    Computed in float32 relative to the largest log-sum-exp, so no exponential overflows.
    """
    assert parts, "attention over no keys at all"
    if len(parts) == 1 and parts[0].mass is None:
        return parts[0].out
    lse = torch.stack([part.lse for part in parts])  # [parts, heads, queries], float32
    weights = torch.softmax(lse, dim=0)
    total = weights[0].unsqueeze(-1) * parts[0].out
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total + weight.unsqueeze(-1) * part.out
    if any(part.mass is not None for part in parts):
        masses = zip(weights, (part.mass for part in parts), strict=True)
        total = total / sum(w if m is None else w * m for w, m in masses).unsqueeze(-1)
    return total.to(parts[0].out.dtype)


def sink_part(sinks: torch.Tensor, query: torch.Tensor) -> Partial:
    """What an attention sink adds: to the denominator only, as a key whose value is 0.

    `sinks`: [heads], the score of each head's sink. `query`: [heads, queries, head_dim].
    """
    lse = sinks.float()[:, None].expand(query.shape[:2])
    return Partial(torch.zeros_like(query), lse)


def join(parts: Sequence[Partial]) -> Partial:
    """Join parts of keys and values into the part over all of their keys."""
    assert all(part.mass is None for part in parts)
    if len(parts) == 1:
        return parts[0]
    return Partial(merge(parts), torch.stack([part.lse for part in parts]).logsumexp(0))


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Plain attention, also for soft-capped layers and layers with a sliding window.

    `query`: [heads, queries, head_dim]; `key`, `value`: [kv_heads, keys, head_dim]; `mask`:
    [queries, keys], bool, true where a key is visible. Every query must see some key. `softcap`
    bounds scores to ±softcap by tanh, as in Gemma 2.
    """
    heads, queries, _ = query.shape
    kv_heads = key.shape[0]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).reshape(kv_heads, heads // kv_heads * queries, -1)
    scores = (grouped @ key.to(wide).transpose(-1, -2) * scale).reshape(heads, queries, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    out = weights.reshape(kv_heads, -1, scores.shape[-1]) @ value.to(wide)
    return Partial(out.reshape(heads, queries, -1).to(query.dtype), lse)
