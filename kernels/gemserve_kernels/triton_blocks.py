"""What the Triton kernels share: loading a block of rows, and scoring it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 as if it were integers, so blocks become float32 there.
# On a GPU they keep their dtype, which is what its tensor cores multiply.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# How tl.dot multiplies float32: three products in tf32 stand for one. Halves are exact either way.
PRECISION = tl.constexpr("tf32x3")


def block_of(size: int, most: int | None = None) -> int:
    """A block's side for `size` elements: a power of two, at least tl.dot's 16, at most `most`."""
    block = max(16, int(triton.next_power_of_2(size)))
    return block if most is None else min(block, most)


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of one block: 16 KiB of them, so that a few fit a multiprocessor's shared memory."""
    return max(16, min(64, (16 << 10) // (block_of(head_dim) * dtype.itemsize)))


@triton.jit
def load_rows(
    base: tl.tensor,
    rows: tl.tensor,
    row_step: tl.tensor,
    is_row: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> tl.tensor:
    """A block [rows, DIM_BLOCK] in the dtype of the memory, 0 outside of what there is."""
    dims = tl.arange(0, DIM_BLOCK)
    at = base + rows[:, None] * row_step + dims[None, :]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    block = tl.load(at, mask=mask, other=0.0)
    if _IS_INTERPRETED:
        block = block.to(tl.float32)
    return block


@triton.jit
def score_block(
    query: tl.tensor,
    key: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """Scaled scores [rows, keys], float32, of [rows, dim] and [keys, dim].

    SOFTCAP, if it is given, bounds them.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if SOFTCAP is not None:
        ratio = scores / SOFTCAP
        shrunk = tl.exp(-2.0 * tl.abs(ratio))  # tanh by an exponential that cannot overflow
        bounded = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(ratio < 0, -bounded, bounded)
    return scores
