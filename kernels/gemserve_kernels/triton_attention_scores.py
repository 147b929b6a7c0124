"""Triton's twin of `attention_scores`: how much rows of a prompt attend to its tokens.

Keys are read twice. The first pass finds every row's log-sum-exp, in pieces of `_SPLIT` keys that
run side by side. With it the second pass can turn each score into a probability at once. Only one
block of [heads, rows, keys] exists at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gemserve_kernels.triton_blocks import block_of, key_block, load_rows, score_block

_SPLIT = 1024  # keys of one program of the first pass, a multiple of every block size
_MOST_ROWS = 32


def largest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `attention_scores.largest_attention`."""
    heads, num_rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    lse = _log_sum_exp(query, key, rows, scale, softcap)
    largest = torch.empty(keys, dtype=torch.float32, device=key.device)
    block = key_block(head_dim, key.dtype)
    _largest_kernel[(triton.cdiv(keys, block),)](
        query, key, rows, lse, largest,
        kv_heads, heads // kv_heads, num_rows, keys,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), scale,
        HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim), ROWS=block_of(num_rows, _MOST_ROWS),
        KEYS=block, SOFTCAP=softcap,
    )  # fmt: skip
    return largest


def grouped_probabilities(
    query: torch.Tensor, key: torch.Tensor, *, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """See `attention_scores.grouped_probabilities`."""
    heads, window, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    rows = torch.arange(keys - window, keys, device=key.device)
    lse = _log_sum_exp(query, key, rows, scale, softcap)
    total = torch.empty(kv_heads, keys, dtype=torch.float32, device=key.device)
    group, block = heads // kv_heads, key_block(head_dim, key.dtype)
    _grouped_kernel[(triton.cdiv(keys, block), kv_heads)](
        query, key, lse, total,
        group, window, keys,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), scale,
        HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim), ROWS=block_of(group * window, _MOST_ROWS),
        KEYS=block, SOFTCAP=softcap,
    )  # fmt: skip
    return total


def _log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Log-sum-exp of every row's scores: [heads, rows], float32. `rows` are positions."""
    heads, num_rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    assert 0 < num_rows <= keys
    assert query.dtype == key.dtype
    assert query.stride(2) == key.stride(2) == rows.stride(0) == 1
    group, block = heads // kv_heads, key_block(head_dim, key.dtype)
    block_rows = block_of(group * num_rows, _MOST_ROWS)
    splits = triton.cdiv(keys, _SPLIT)
    lse = torch.empty(splits, heads, num_rows, dtype=torch.float32, device=key.device)
    _lse_kernel[(splits, kv_heads, triton.cdiv(group * num_rows, block_rows))](
        query, key, rows, lse,
        kv_heads, group, num_rows, keys, _SPLIT,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), scale,
        HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim), ROWS=block_rows,
        KEYS=block, SOFTCAP=softcap,
    )  # fmt: skip
    return lse[0] if splits == 1 else lse.logsumexp(0)


@triton.jit
def _lse_kernel(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    lse: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    num_rows: tl.tensor,
    keys: tl.tensor,
    split: tl.tensor,
    query_head_step: tl.int64,
    query_row_step: tl.int64,
    key_head_step: tl.int64,
    key_step: tl.int64,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Log-sum-exp over one piece of keys, for some rows of one key head's group.

    It stores `lse` [splits, heads, num_rows].
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # of the group's heads, one by one
    is_row = rows < group * num_rows
    own = rows % num_rows
    last_seen = tl.load(positions + own, mask=is_row, other=0)
    steps = (kv_head * group + rows // num_rows) * query_head_step + own * query_row_step
    q = load_rows(query, steps, 1, is_row, HEAD_DIM, DIM_BLOCK)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(part * split, tl.minimum(part * split + split, keys), KEYS):
        columns = first + tl.arange(0, KEYS)
        k = load_rows(
            key + kv_head * key_head_step, columns, key_step, columns < keys, HEAD_DIM, DIM_BLOCK
        )
        scores = score_block(q, k, scale, SOFTCAP)
        scores = tl.where(columns[None, :] <= last_seen[:, None], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        # a row that has seen no key yet has −inf, and −inf − (−inf) would be NaN
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(scores - shift[:, None]), 1)
        largest = higher
    is_empty = total == 0.0  # false for a NaN, which must stay a NaN
    found = tl.where(is_empty, float("-inf"), largest + tl.log(tl.where(is_empty, 1.0, total)))
    at = (part * kv_heads + kv_head) * group * num_rows + rows
    tl.store(lse + at, found, mask=is_row)


@triton.jit
def _largest_kernel(
    query: tl.tensor,
    key: tl.tensor,
    positions: tl.tensor,
    lse: tl.tensor,
    largest: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,
    num_rows: tl.tensor,
    keys: tl.tensor,
    query_head_step: tl.int64,
    query_row_step: tl.int64,
    key_head_step: tl.int64,
    key_step: tl.int64,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Some keys of `largest` [keys], the maximum over all heads and rows."""
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    is_key = columns < keys
    best = tl.zeros([ROWS, KEYS], tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < num_rows
        last_seen = tl.load(positions + rows, mask=is_row, other=0)
        is_seen = (columns[None, :] <= last_seen[:, None]) & is_row[:, None]
        for kv_head in range(kv_heads):
            k = load_rows(
                key + kv_head * key_head_step, columns, key_step, is_key, HEAD_DIM, DIM_BLOCK
            )
            for member in range(group):
                head = kv_head * group + member
                q = load_rows(
                    query + head * query_head_step,
                    rows,
                    query_row_step,
                    is_row,
                    HEAD_DIM,
                    DIM_BLOCK,
                )
                scores = score_block(q, k, scale, SOFTCAP)
                norm = tl.load(lse + head * num_rows + rows, mask=is_row, other=0.0)
                shares = tl.exp(tl.where(is_seen, scores - norm[:, None], float("-inf")))
                # a maximum must not hide a NaN, because the caller checks for it
                best = tl.maximum(best, shares, propagate_nan=tl.PropagateNan.ALL)
    tl.store(largest + columns, _largest_or_nan(best), mask=is_key)


@triton.jit
def _largest_or_nan(values: tl.tensor) -> tl.tensor:
    """The maximum over rows, or NaN where a row has a NaN, which tl.max ignores."""
    is_nan = tl.sum(tl.where(values == values, 0, 1), 0) > 0
    return tl.where(is_nan, float("nan"), tl.max(values, 0))


@triton.jit
def _grouped_kernel(
    query: tl.tensor,
    key: tl.tensor,
    lse: tl.tensor,
    grouped: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    keys: tl.tensor,
    query_head_step: tl.int64,
    query_row_step: tl.int64,
    key_head_step: tl.int64,
    key_step: tl.int64,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Some keys of one key head of `grouped` [kv_heads, keys].

    It sums over the rows and the heads of the group.
    """
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    kv_head = tl.program_id(1)
    is_key = columns < keys
    k = load_rows(key + kv_head * key_head_step, columns, key_step, is_key, HEAD_DIM, DIM_BLOCK)
    total = tl.zeros([KEYS], tl.float32)
    for first in range(0, group * window, ROWS):
        rows = first + tl.arange(0, ROWS)  # of the group's heads, one by one
        is_row = rows < group * window
        own = rows % window
        steps = (kv_head * group + rows // window) * query_head_step + own * query_row_step
        q = load_rows(query, steps, 1, is_row, HEAD_DIM, DIM_BLOCK)
        scores = score_block(q, k, scale, SOFTCAP)
        norm = tl.load(lse + kv_head * group * window + rows, mask=is_row, other=0.0)
        is_seen = (columns[None, :] <= (keys - window + own)[:, None]) & is_row[:, None]
        shares = tl.exp(tl.where(is_seen, scores - norm[:, None], float("-inf")))
        total += tl.sum(shares, 0)
    tl.store(grouped + kv_head * tl.cast(keys, tl.int64) + columns, total, mask=is_key)
