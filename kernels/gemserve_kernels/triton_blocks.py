"""What the Triton kernels share: they load a block of rows, and compute its scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 as if it were integers, so blocks become float32 there.
# On a GPU they keep their dtype, which is what its tensor cores multiply.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# tl.dot multiplies float32 as three products in tf32. Half precision is exact either way.
PRECISION = tl.constexpr("tf32x3")


def block_of(size: int, most: int | None = None) -> int:
    """Side of a block for `size` elements: a power of two, from tl.dot's 16 to `most`."""
    block = max(16, int(triton.next_power_of_2(size)))
    return block if most is None else min(block, most)


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of one block. They take 16 KiB, so that a few blocks fit into shared memory."""
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
    """Load a block [rows, DIM_BLOCK] in the memory's dtype. Places out of range are 0."""
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

    SOFTCAP bounds them, if it is given.
    """
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if SOFTCAP is not None:
        ratio = scores / SOFTCAP
        # computes tanh by an exponential that cannot overflow
        shrunk = tl.exp(-2.0 * tl.abs(ratio))
        bounded = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(ratio < 0, -bounded, bounded)
    return scores
