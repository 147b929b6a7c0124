"""Triton's twin of `attention_scores.pooled`: it smooths scores over neighbours."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


def pooled(scores: torch.Tensor, *, kind: str, width: int = 5) -> torch.Tensor:
    """See `attention_scores.pooled`; `scores` are float32 or float64, and `width` is odd."""
    if kind not in ("mean", "max"):
        raise ValueError(f"pooling={kind!r}: must be 'mean' or 'max'")
    assert width % 2 == 1
    assert scores.dtype in (torch.float32, torch.float64)
    scores = scores.contiguous()
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    keys = scores.shape[-1]
    grid = (triton.cdiv(keys, _BLOCK), scores.numel() // keys)
    _pool_kernel[grid](scores, out, keys, width // 2, IS_MEAN=kind == "mean", KEYS=_BLOCK)
    return out


@triton.jit
def _pool_kernel(
    scores: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    reach: tl.tensor,
    IS_MEAN: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Pool some keys of one row. Beyond its ends a mean sees zeros, a maximum nothing."""
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    row = tl.program_id(1) * tl.cast(keys, tl.int64)
    outside = 0.0 if IS_MEAN else float("-inf")
    total = tl.full([KEYS], outside, scores.dtype.element_ty)
    for offset in range(-reach, reach + 1):
        at = columns + offset
        near = tl.load(scores + row + at, mask=(at >= 0) & (at < keys), other=outside)
        if IS_MEAN:
            total += near
        else:  # a maximum must not hide a NaN
            total = tl.maximum(total, near, propagate_nan=tl.PropagateNan.ALL)
    if IS_MEAN:
        total = total / (2 * reach + 1)
    tl.store(out + row + columns, total, mask=columns < keys)
