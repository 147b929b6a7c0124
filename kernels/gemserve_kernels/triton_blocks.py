"""What the Triton kernels share: loading a block of rows, and scoring it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def block_of(size: int, most: int | None = None) -> int:
    """A block's side for `size` elements: a power of two, at least tl.dot's 16, at most `most`."""
    block = max(16, int(triton.next_power_of_2(size)))
    return block if most is None else min(block, most)


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of one block: 16 KiB of them, so that a few fit a multiprocessor's shared memory."""
    return max(16, min(64, (16 << 10) // (block_of(head_dim) * dtype.itemsize)))


def precision_of(*operands: torch.Tensor) -> str:
    """How tl.dot multiplies the operands once they are float32.

    Halves of either kind fit tf32, so that their products are exact there; float32 does not.
    """
    is_half = all(t.dtype in (torch.float16, torch.bfloat16) for t in operands)
    return "tf32" if is_half else "tf32x3"


@triton.jit
def load_rows(
    base: tl.tensor,
    rows: tl.tensor,
    row_step: tl.tensor,
    is_row: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> tl.tensor:
    """[rows, DIM_BLOCK], float32; 0 outside of what there is."""
    dims = tl.arange(0, DIM_BLOCK)
    at = base + rows[:, None] * row_step + dims[None, :]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    # float32 at once: Triton's interpreter multiplies bfloat16 as if it were integers
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def score_block(
    query: tl.tensor,
    key: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Scaled scores [rows, keys] of [rows, dim] and [keys, dim]; SOFTCAP, if any, bounds them."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if SOFTCAP is not None:
        ratio = scores / SOFTCAP
        shrunk = tl.exp(-2.0 * tl.abs(ratio))  # tanh by an exponential that cannot overflow
        bounded = SOFTCAP * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(ratio < 0, -bounded, bounded)
    return scores
