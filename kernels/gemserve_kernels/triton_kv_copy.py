"""Triton's twins of `kv_copy`: they copy keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gemserve_kernels.kv_table import KVTable

_TOKENS = 32  # tokens that one program copies


def gather_tokens(source: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
    """See `kv_copy.gather_tokens`. `chosen` is not checked against the source's length."""
    layers, kv_heads, kept = chosen.shape
    head_dim = source.shape[-1]
    assert source.dtype == target.dtype
    assert source.stride(4) == target.stride(4) == 1
    assert not _overlap(source, target)
    _gather_kernel[(triton.cdiv(kept, _TOKENS), kv_heads, layers * 2)](
        source, target, chosen, kept,
        source.stride(0), source.stride(1), source.stride(2), source.stride(3),
        target.stride(0), target.stride(1), target.stride(2), target.stride(3),
        chosen.stride(0), chosen.stride(1), chosen.stride(2),
        HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim), TOKENS=_TOKENS,
    )  # fmt: skip


def write_tokens(kv: KVTable, key: torch.Tensor, value: torch.Tensor, *, layer: int) -> None:
    """See `kv_copy.write_tokens`. It never waits for the device."""
    kv_heads, sequences, head_dim = key.shape
    assert (kv_heads, sequences) == (kv.kv_heads, kv.num_sequences)
    assert key.shape == value.shape
    assert key.dtype == value.dtype == kv.rows.dtype
    assert key.stride(2) == value.stride(2) == 1
    _write_kernel[(sequences,)](
        kv.rows, kv.table, key, value, layer, kv_heads,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim),
        HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the ranges of bytes, from first to last element, of two tensors overlap."""
    (low, high), (other_low, other_high) = (
        (
            t.data_ptr(),
            t.data_ptr()
            + t.element_size()
            * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))),
        )
        for t in (one, other)
    )
    return low < other_high and other_low < high


@triton.jit
def _gather_kernel(
    source: tl.tensor,
    target: tl.tensor,
    chosen: tl.tensor,
    kept: tl.tensor,
    source_layer: tl.int64,
    source_side: tl.int64,
    source_head: tl.int64,
    source_token: tl.int64,
    target_layer: tl.int64,
    target_side: tl.int64,
    target_head: tl.int64,
    target_token: tl.int64,
    chosen_layer: tl.int64,
    chosen_head: tl.int64,
    chosen_token: tl.int64,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Copy some tokens of one head's keys or values in one layer."""
    head = tl.program_id(1)
    layer, side = tl.program_id(2) // 2, tl.program_id(2) % 2
    slots = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_slot = slots < kept
    place = chosen + layer * chosen_layer + head * chosen_head + slots * chosen_token
    positions = tl.load(place, mask=is_slot, other=0)
    dims = tl.arange(0, DIM_BLOCK)
    mask = is_slot[:, None] & (dims < HEAD_DIM)[None, :]
    read = source + layer * source_layer + side * source_side + head * source_head
    rows = tl.load(read + positions[:, None] * source_token + dims[None, :], mask=mask)
    write = target + layer * target_layer + side * target_side + head * target_head
    tl.store(write + slots[:, None] * target_token + dims[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _write_kernel(
    memory: tl.tensor,
    table: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    layer: tl.tensor,
    kv_heads: tl.tensor,
    key_head: tl.int64,
    key_sequence: tl.int64,
    value_head: tl.int64,
    value_sequence: tl.int64,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Store one sequence's newest token in all heads."""
    sequence = tl.program_id(0)
    place = table + sequence * 5
    length = tl.load(place + 4)
    if length == 0:
        return
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM_BLOCK)
    mask = (heads < kv_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    last_row = tl.load(place) + layer * tl.load(place + 3) + length - 1
    rows = last_row + heads * tl.load(place + 1)  # int64, as the table is
    k = tl.load(
        key + sequence * key_sequence + heads[:, None] * key_head + dims[None, :], mask=mask
    )
    v = tl.load(
        value + sequence * value_sequence + heads[:, None] * value_head + dims[None, :], mask=mask
    )
    tl.store(memory + rows[:, None] * HEAD_DIM + dims[None, :], k, mask=mask)
    tl.store(memory + (rows + tl.load(place + 2))[:, None] * HEAD_DIM + dims[None, :], v, mask=mask)
