"""Triton's twin of `ntk.merge_ntk`: it evaluates and joins the term in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from gemserve_kernels.attention import Partial, join
from gemserve_kernels.ntk import LEAST_SHARE
from gemserve_kernels.triton_blocks import PRECISION, block_of

_FEATURES = 64  # features of one step of the loop


def merge_ntk(
    parts: Sequence[Partial],
    query: torch.Tensor,
    z_a: torch.Tensor,
    z_b: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor:
    """See `ntk.merge_ntk`."""
    part = join(parts)
    heads, queries, head_dim = query.shape
    features, inner = z_a.shape[1:]
    assert features in (head_dim, 2 * head_dim)
    assert z_a.dtype == z_b.dtype == k.dtype == torch.float32
    assert query.stride(2) == part.out.stride(2) == 1
    z_a, z_b, k = z_a.contiguous(), z_b.contiguous(), k.contiguous()
    out = torch.empty(heads, queries, head_dim, dtype=part.out.dtype, device=query.device)
    rows = block_of(queries, most=32 if head_dim <= 128 else 16)
    _merge_kernel[(triton.cdiv(queries, rows), heads)](
        query, part.out, part.lse, z_a, z_b, k, out,
        queries, features, inner, head_dim**-0.25,
        query.stride(0), query.stride(1), part.out.stride(0), part.out.stride(1),
        part.lse.stride(0), part.lse.stride(1),
        LEAST=LEAST_SHARE, HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim),
        INNER_BLOCK=block_of(inner), ROWS=rows, FEATURES=_FEATURES,
    )  # fmt: skip
    return out


@triton.jit
def _merge_kernel(
    query: tl.tensor,
    attended: tl.tensor,
    lse: tl.tensor,
    z_a: tl.tensor,
    z_b: tl.tensor,
    k: tl.tensor,
    out: tl.tensor,
    queries: tl.tensor,
    features: tl.tensor,
    inner: tl.tensor,
    unit: tl.tensor,
    query_head_step: tl.int64,
    query_step: tl.int64,
    attended_head_step: tl.int64,
    attended_step: tl.int64,
    lse_head_step: tl.int64,
    lse_step: tl.int64,
    LEAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    INNER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
) -> None:
    """Merge the parts and the term for some queries of one head."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    is_row = rows < queries
    dims = tl.arange(0, DIM_BLOCK)
    is_dim = (dims < HEAD_DIM)[None, :]
    term, held = _term(
        query + head * query_head_step, rows, head, z_a, z_b, k,
        queries, features, inner, unit, query_step,
        LEAST, HEAD_DIM, DIM_BLOCK, INNER_BLOCK, ROWS, FEATURES,
    )  # fmt: skip
    size = tl.load(lse + head * lse_head_step + rows * lse_step, mask=is_row, other=0.0)
    # where k is all zero there is no term; the larger log-sum-exp becomes the unit
    term_size = tl.where(held == 0.0, float("-inf"), 0.0)
    most = tl.maximum(size, term_size)
    weight, term_weight = tl.exp(size - most), tl.exp(term_size - most)
    at = attended + head * attended_head_step + rows[:, None] * attended_step + dims[None, :]
    mask = is_row[:, None] & is_dim
    above = weight[:, None] * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    above += term_weight[:, None] * term
    below = weight + term_weight * held
    places = (head * tl.cast(queries, tl.int64) + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, above / below[:, None], mask=mask)


@triton.jit
def _term(
    query: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    z_a: tl.tensor,
    z_b: tl.tensor,
    k: tl.tensor,
    queries: tl.tensor,
    features: tl.tensor,
    inner: tl.tensor,
    unit: tl.tensor,
    query_step: tl.int64,
    LEAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    INNER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """φ(q)·Z [ROWS, DIM_BLOCK] and the mass φ(q)·k [ROWS] of some queries of one head."""
    is_row = rows < queries
    inners = tl.arange(0, INNER_BLOCK)
    is_inner = inners < inner
    middle = tl.zeros([ROWS, INNER_BLOCK], tl.float32)  # φ(q)·Z_A
    # float64, because the sum may be a thousandth of its terms
    mass = tl.zeros([ROWS], tl.float64)
    least = tl.zeros([ROWS], tl.float64)
    for first in range(0, features, FEATURES):
        columns = first + tl.arange(0, FEATURES)
        is_column = columns < features
        is_feature = is_row[:, None] & is_column[None, :]
        phi = _features(query + rows[:, None] * query_step, columns, is_feature, unit, HEAD_DIM)
        places = head * features + columns
        a = tl.load(
            z_a + places[:, None] * inner + inners[None, :],
            mask=is_column[:, None] & is_inner[None, :],
            other=0.0,
        )
        middle += tl.dot(phi, a, input_precision=PRECISION)
        terms = phi.to(tl.float64) * tl.load(k + places, mask=is_column, other=0.0)[None, :]
        mass += tl.sum(terms, 1)
        least += tl.sum(tl.abs(terms), 1)
    dims = tl.arange(0, DIM_BLOCK)[None, :]
    mask = is_inner[:, None] & (dims < HEAD_DIM)
    b = tl.load(z_b + (head * inner + inners[:, None]) * HEAD_DIM + dims, mask=mask, other=0.0)
    term = tl.dot(middle, b, input_precision=PRECISION)  # φ(q)·Z
    return term, tl.maximum(mass, LEAST * least, propagate_nan=tl.PropagateNan.ALL).to(tl.float32)


@triton.jit
def _features(
    query: tl.tensor, columns: tl.tensor, mask: tl.tensor, unit: tl.tensor, HEAD_DIM: tl.constexpr
) -> tl.tensor:
    """The features φ(q) in `columns`, of the queries that the pointers `query` [rows, 1] name."""
    is_mirrored = columns >= HEAD_DIM  # the second half of 2·head_dim features is φ(−q)
    dims = tl.where(is_mirrored, columns - HEAD_DIM, columns)
    z = tl.load(query + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.where(is_mirrored[None, :], -z, z)
    return tl.where(z >= 0, z, tl.exp(tl.where(z >= 0, 0.0, z))) * unit + 1.0
