"""How much some rows of a prompt attend to each of its tokens in one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


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


class SinkAttention(NamedTuple):
    """What rows of each head attend to in a text that begins with attention sinks.

    All are float32. `sinks`, `keys`: log-sum-exps of the sinks' logits and of the keys', [heads,
    rows]. `best`: the highest logits of keys, [heads, rows, most], and `places`: which keys they
    are, int64. `shares`: for each head and key the largest share of all attention that a row of the
    first ones, or of all, pays to it: [2, heads, keys].
    """

    sinks: torch.Tensor
    keys: torch.Tensor
    best: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor


def attention_beside_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    num_sinks: int,
    *,
    most: int,
    num_first: int,
    scale: float,
    softcap: float | None = None,
) -> SinkAttention:
    """How rows attend to keys behind the first `num_sinks` keys.

    `query`: [heads, rows, head_dim]; `key`: [kv_heads, num_sinks + keys, head_dim], all of which
    every row sees; both after RoPE. `most`: how many of the best keys of each row are listed.
    `num_first`: the rows that `shares` begin with. One head's scores exist at a time.
    """
    group = query.shape[0] // key.shape[0]
    found = [
        attention_of_all_heads_beside_sinks(
            query[head : head + 1],
            key[head // group][None],
            num_sinks,
            most=most,
            num_first=num_first,
            scale=scale,
            softcap=softcap,
        )
        for head in range(len(query))
    ]
    return SinkAttention(
        sinks=torch.cat([head.sinks for head in found]),
        keys=torch.cat([head.keys for head in found]),
        best=torch.cat([head.best for head in found]),
        places=torch.cat([head.places for head in found]),
        shares=torch.cat([head.shares for head in found], dim=1),
    )


def attention_of_all_heads_beside_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    num_sinks: int,
    *,
    most: int,
    num_first: int,
    scale: float,
    softcap: float | None = None,
) -> SinkAttention:
    """`attention_beside_sinks` with all heads at once: on a GPU, launches are what it costs.

    Scores of [heads, rows, keys] exist at a time.
    """
    heads, rows, dim = query.shape
    grouped = query.float().reshape(key.shape[0], -1, dim)
    scores = (grouped @ key.float().transpose(1, 2)).view(heads, rows, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sinks, logits = scores[..., :num_sinks].logsumexp(-1), scores[..., num_sinks:]
    keys = logits.logsumexp(-1)
    best, places = logits.topk(min(most, logits.shape[-1]), dim=-1)
    shares = (logits - torch.logaddexp(sinks, keys)[..., None]).exp()
    both = torch.stack([shares[:, :num_first].amax(1), shares.amax(1)])
    return SinkAttention(sinks, keys, best, places, both)


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
