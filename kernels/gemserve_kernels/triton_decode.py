"""Triton's twin of `decode`: the attention of a decode step in one or two launches.

Keys and values are read where they are in memory. A group's query heads are the rows of one
product, so that each key is read once. Long sequences are split into pieces that run side by side.
Each piece gives its output and log-sum-exp, and a second kernel joins the pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gemserve_kernels.attention import Partial
from gemserve_kernels.kv_table import KVTable
from gemserve_kernels.triton_blocks import (
    PRECISION,
    block_of,
    key_block,
    load_rows,
    score_block,
)

_PROGRAMS = 512  # programs to have at once: a few for each multiprocessor of a large GPU
_PIECES = 16  # pieces joined at a time


def decode_attention(
    query: torch.Tensor,
    kv: KVTable,
    *,
    layer: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Partial:
    """See `decode.decode_attention`. It never waits for the device."""
    sequences, heads, head_dim = query.shape
    assert sequences == kv.num_sequences
    assert query.stride(2) == 1
    assert kv.rows.shape[1] == head_dim
    assert kv.rows.dtype == query.dtype
    group = heads // kv.kv_heads
    visible = kv.longest if window is None else min(window, kv.longest)
    block = key_block(head_dim, kv.rows.dtype)
    split = _split_size(sequences * kv.kv_heads, visible, block)
    splits = max(1, triton.cdiv(visible, split))
    device = query.device
    out = torch.empty(sequences, heads, head_dim, dtype=query.dtype, device=device)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=device)
    pieces, piece_lse = out, lse
    if splits > 1:
        shape = (splits, sequences, heads)
        pieces = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        piece_lse = torch.empty(shape, dtype=torch.float32, device=device)
    _attend_kernel[(splits, kv.kv_heads, sequences)](
        query, kv.rows, kv.table, pieces, piece_lse,
        layer, group, visible, split, query.stride(0), query.stride(1), scale,
        HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim), ROWS=block_of(group),
        KEYS=block, SOFTCAP=softcap,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(heads, sequences)](
            pieces, piece_lse, kv.table, out, lse, visible, split,
            HEAD_DIM=head_dim, DIM_BLOCK=block_of(head_dim), PIECES=_PIECES,
        )  # fmt: skip
    return Partial(out.transpose(0, 1), lse.T)


def _split_size(programs: int, visible: int, block: int) -> int:
    """Keys of one piece: whole blocks, and so few that a large GPU stays busy."""
    blocks = max(1, triton.cdiv(visible, block))
    splits = min(blocks, max(1, _PROGRAMS // max(1, programs)))
    return int(triton.cdiv(blocks, splits)) * block


@triton.jit(do_not_specialize=["layer", "visible"])
def _attend_kernel(
    query: tl.tensor,
    memory: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    layer: tl.tensor,
    group: tl.tensor,
    visible: tl.tensor,
    split: tl.tensor,
    query_step: tl.int64,
    query_head_step: tl.int64,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """Attend to a piece of a sequence: `out` [splits, sequences, heads, head_dim] and `lse`."""
    part, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = table + sequence * 5
    to_value = tl.load(place + 2)
    first_row = tl.load(place) + layer * tl.load(place + 3) + kv_head * tl.load(place + 1)
    length = tl.load(place + 4).to(tl.int32)
    start = tl.maximum(length - visible, 0) + part * split
    # the first piece of an empty sequence stores −inf; later pieces past the end are never read
    if (part > 0) & (start >= length):
        return
    stop = tl.minimum(start + split, length)
    members = tl.arange(0, ROWS)
    is_member = members < group
    heads = kv_head * group + members
    q = load_rows(
        query + sequence * query_step, heads, query_head_step, is_member, HEAD_DIM, DIM_BLOCK
    )
    largest, total, summed = _attend_range(
        q, memory, first_row, to_value, start, stop, scale, HEAD_DIM, DIM_BLOCK, ROWS, KEYS, SOFTCAP
    )
    is_empty = total == 0.0  # false for a NaN, which must stay a NaN
    total = tl.where(is_empty, 1.0, total)
    dims = tl.arange(0, DIM_BLOCK)
    num_heads = tl.num_programs(1) * group
    places = (part.to(tl.int64) * tl.num_programs(2) + sequence) * num_heads + heads
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + places[:, None] * HEAD_DIM + dims[None, :], summed / total[:, None], mask=mask)
    found = tl.where(is_empty, float("-inf"), largest + tl.log(total))
    tl.store(lse + places, found, mask=is_member)


@triton.jit
def _attend_range(
    q: tl.tensor,
    memory: tl.tensor,
    first_row: tl.tensor,
    to_value: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to tokens start..stop−1.

    Returns the largest score of each row, and relative to it the sum of the exponentials and their
    sum times the values [ROWS, DIM_BLOCK].
    """
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    for begin in range(start, stop, KEYS):
        tokens = begin + tl.arange(0, KEYS)
        is_token = tokens < stop
        rows = first_row + tokens  # int64, as the table is
        k = load_rows(memory, rows, HEAD_DIM, is_token, HEAD_DIM, DIM_BLOCK)
        scores = score_block(q, k, scale, SOFTCAP)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        # `largest` is finite, because every block holds a token
        higher = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - higher)
        shares = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(shares, 1)
        v = load_rows(memory, rows + to_value, HEAD_DIM, is_token, HEAD_DIM, DIM_BLOCK)
        values = tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        summed = summed * shrink[:, None] + values
        largest = higher
    return largest, total, summed


@triton.jit(do_not_specialize=["visible"])
def _join_kernel(
    pieces: tl.tensor,
    piece_lse: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    visible: tl.tensor,
    split: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Join the pieces of one head of one sequence: `out` [sequences, heads, head_dim]."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    length = tl.load(table + sequence * 5 + 4).to(tl.int32)
    count = tl.cdiv(tl.minimum(length, visible), split)
    own = sequence.to(tl.int64) * tl.num_programs(0) + head
    # the step from one piece to the next
    step = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    largest = tl.full([PIECES], float("-inf"), tl.float32)
    for first in range(0, count, PIECES):
        parts = first + tl.arange(0, PIECES)
        found = tl.load(piece_lse + own + parts * step, mask=parts < count, other=float("-inf"))
        largest = tl.maximum(largest, found)
    most = tl.max(largest, 0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    dims = tl.arange(0, DIM_BLOCK)
    is_dim = dims < HEAD_DIM
    total = tl.zeros([PIECES], tl.float32)
    summed = tl.zeros([DIM_BLOCK], tl.float32)
    for first in range(0, count, PIECES):
        parts = first + tl.arange(0, PIECES)
        is_part = parts < count
        found = tl.load(piece_lse + own + parts * step, mask=is_part, other=float("-inf"))
        weights = tl.exp(found - shift)
        at = pieces + (own + parts * step)[:, None] * HEAD_DIM + dims[None, :]
        piece = tl.load(at, mask=is_part[:, None] & is_dim[None, :], other=0.0)
        total += weights
        summed += tl.sum(weights[:, None] * piece, 0)
    weight = tl.sum(total, 0)
    is_empty = weight == 0.0
    weight = tl.where(is_empty, 1.0, weight)
    tl.store(out + own * HEAD_DIM + dims, summed / weight, mask=is_dim)
    tl.store(lse + own, tl.where(is_empty, float("-inf"), shift + tl.log(weight)))
