"""How much some rows of a prompt attend to each of its tokens in one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MOST_LOGIT = 60.0  # whose exponentials can be added up in float32


def raw_scores(
    query: torch.Tensor, key: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> torch.Tensor:
    """Σ over heads of q·Kᵀ for one query row: [keys], float32.

    `query`: [heads, head_dim], `key`: [kv_heads, keys, head_dim], both after RoPE. There is no 1/√d
    and no softmax (GemFilter, Algorithm 2). Without a soft cap the queries of a group are summed
    before the product, so that each key is read once. A soft cap applies to scaled scores, head by
    head.
    """
    kv_heads = key.shape[0]
    grouped = query.float().reshape(kv_heads, -1, query.shape[-1])  # [kv_heads, group, head_dim]
    if softcap is None:
        summed = grouped.sum(dim=1)
        total = torch.zeros(key.shape[1], device=key.device)
        for head in range(kv_heads):
            total += key[head].float() @ summed[head]
        return total
    total = torch.zeros(key.shape[1], device=key.device)
    for head in range(kv_heads):
        scores = grouped[head] @ key[head].float().T * scale
        total += (softcap * torch.tanh(scores / softcap)).sum(dim=0)
    return total


def largest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The largest probability that any head and row gives to each key: [keys], float32.

    `query`: [heads, rows, head_dim], the queries of the tokens at positions `rows` [rows], int64,
    ascending; `key`: [kv_heads, keys, head_dim]; both post-RoPE. Each row is causal: it sees the
    keys up to its own position. One head's [rows, keys] probabilities exist at a time.
    """
    heads = query.shape[0]
    kv_heads, keys, _ = key.shape
    group = heads // kv_heads
    future = torch.arange(keys, device=key.device)[None, :] > rows[:, None]  # [rows, keys]
    largest = torch.zeros(keys, device=key.device)
    for head in range(heads):
        scores = query[head].float() @ key[head // group].float().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores.masked_fill_(future, -torch.inf)
        torch.maximum(largest, scores.softmax(-1).amax(dim=0), out=largest)
    return largest


def largest_beside_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    num_sinks: int,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """How much more any head and row attends to a key than to the sinks, at most: [keys], float32.

    `query`: [heads, rows, head_dim]; `key`: [kv_heads, num_sinks + keys, head_dim], which every row
    sees; both after RoPE. The first keys are attention sinks. A key's number is the quotient of its
    attention and that of the sinks together. So it does not depend on other keys, and numbers of
    texts that were read apart, behind the same sinks, can be compared.
    """
    heads, group = query.shape[0], query.shape[0] // key.shape[0]
    largest = torch.full((key.shape[1] - num_sinks,), -torch.inf, device=key.device)
    for head in range(heads):
        scores = query[head].float() @ key[head // group].float().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        sink = scores[:, :num_sinks].logsumexp(-1, keepdim=True)
        torch.maximum(largest, (scores[:, num_sinks:] - sink).amax(dim=0), out=largest)
    return largest.clamp_max(_MOST_LOGIT).exp()


def grouped_probabilities(
    query: torch.Tensor, key: torch.Tensor, *, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Attention probabilities, summed over the last rows and each group's heads.

    `query`: [heads, window, head_dim], the prompt's last rows; `key`: [kv_heads, keys, head_dim];
    both after RoPE. Rows are causal. Returns [kv_heads, keys], float32.
    """
    heads, window, _ = query.shape
    kv_heads, keys, _ = key.shape
    rows = torch.arange(keys - window, keys, device=key.device)
    future = torch.arange(keys, device=key.device)[None, :] > rows[:, None]  # [window, keys]
    total = torch.zeros(kv_heads, keys, device=key.device)
    for head in range(heads):
        group = head * kv_heads // heads
        scores = query[head].float() @ key[group].float().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        total[group] += scores.masked_fill_(future, -torch.inf).softmax(-1).sum(dim=0)
    return total


def pooled(scores: torch.Tensor, *, kind: str, width: int = 5) -> torch.Tensor:
    """Smooth [..., keys] scores over `width` neighbours; `kind`: "mean" (zero padded) or "max"."""
    padding = width // 2
    rows = scores.reshape(1, -1, scores.shape[-1])
    if kind == "mean":
        return F.avg_pool1d(rows, width, stride=1, padding=padding).view(scores.shape)
    if kind == "max":
        return F.max_pool1d(rows, width, stride=1, padding=padding).view(scores.shape)
    raise ValueError(f"pooling={kind!r}: must be 'mean' or 'max'")
