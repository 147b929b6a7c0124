"""Triton's twin of `parts`: a norm, a gated product and a rotation are one launch each on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from gemserve_kernels.cpu_step import ACTIVATIONS

_PRODUCTS = 1024  # numbers of a gate that one program computes
_PAIRS = 512  # pairs of numbers that one program rotates, if a head has no more


@dataclass(frozen=True, slots=True)
class TritonParts:
    """See `parts.LayerParts`. Tensors may be bfloat16 or float16, and of any width.

    `device`: the type of the device. It is "cpu" only in Triton's interpreter.
    """

    device: str = "cuda"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    lanes: ClassVar[int] = 1

    def norm(self, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerParts.norm`."""
        assert states.dtype == weight.dtype
        assert states.dtype in self.dtypes
        states, weight, width = states.contiguous(), weight.contiguous(), weight.numel()
        assert states.shape[-1] == width
        out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
        block = triton.next_power_of_2(width)
        _norm_kernel[(states.numel() // width,)](
            states, weight, out, float(eps),
            WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
        return out

    def gate(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        """See `LayerParts.gate`."""
        assert gate.dtype == up.dtype
        assert gate.dtype in self.dtypes
        assert gate.shape == up.shape
        assert activation in ACTIVATIONS
        gate, up, count = gate.contiguous(), up.contiguous(), gate.numel()
        _gate_kernel[(triton.cdiv(count, _PRODUCTS),)](
            gate, up, count, IS_SILU=activation == "silu", BLOCK=_PRODUCTS
        )
        return gate

    def rotate_both(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerParts.rotate_both`."""
        heads, tokens, width = q.shape
        kv_heads = len(k)
        assert q.dtype == k.dtype == cos.dtype == sin.dtype
        assert q.dtype in self.dtypes
        assert k.shape == (kv_heads, tokens, width)
        assert cos.shape == sin.shape == (tokens, width)
        assert q.stride(2) == k.stride(2) == 1
        assert width % 2 == 0
        cos, sin = cos.contiguous(), sin.contiguous()
        # heads within tokens, as projections make them
        q_out, k_out = (
            torch.empty((tokens, count, width), dtype=q.dtype, device=q.device).transpose(0, 1)
            for count in (heads, kv_heads)
        )
        half_block = triton.next_power_of_2(width // 2)
        rows = max(1, _PAIRS // half_block)
        q_blocks = triton.cdiv(heads, rows)
        _rotate_kernel[(tokens, q_blocks + triton.cdiv(kv_heads, rows))](
            q, k, cos, sin, q_out, k_out,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            q_out.stride(0), q_out.stride(1), k_out.stride(0), k_out.stride(1),
            Q_HEADS=heads, KV_HEADS=kv_heads, Q_BLOCKS=q_blocks, ROWS=rows,
            HALF=width // 2, HALF_BLOCK=half_block,
        )  # fmt: skip
        return q_out, k_out


@triton.jit
def _norm_kernel(
    states: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm one row."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    x = tl.load(states + first + columns, mask=is_column, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + first + columns, x * by * factor, mask=is_column)


@triton.jit
def _gate_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    count: tl.int64,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Put the products of some numbers in their gates' place."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < count
    x = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    power = x
    if not IS_SILU:  # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z))
        power = 1.5957691216 * (x + 0.044715 * x * x * x)
    shrunk = tl.exp(-tl.abs(power))  # an exponential that cannot overflow
    activated = x * tl.where(power < 0, shrunk, 1.0) / (1.0 + shrunk)
    other = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(gate + places, activated * other, mask=mask)


@triton.jit
def _rotate_kernel(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    q_head: tl.int64,
    q_token: tl.int64,
    k_head: tl.int64,
    k_token: tl.int64,
    q_out_head: tl.int64,
    q_out_token: tl.int64,
    k_out_head: tl.int64,
    k_out_token: tl.int64,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Rotate some heads of one token's queries, or of its keys."""
    token, block = tl.program_id(0), tl.program_id(1)
    if block < Q_BLOCKS:
        _rotate(
            q + token * q_token, q_out + token * q_out_token, q_head, q_out_head,
            cos, sin, token, block, Q_HEADS, ROWS, HALF, HALF_BLOCK,
        )  # fmt: skip
    else:
        _rotate(
            k + token * k_token, k_out + token * k_out_token, k_head, k_out_head,
            cos, sin, token, block - Q_BLOCKS, KV_HEADS, ROWS, HALF, HALF_BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate(
    states: tl.tensor,
    out: tl.tensor,
    head_step: tl.tensor,
    out_head_step: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    block: tl.tensor,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Rotate one block of heads of one token, whose first numbers are at `states` and `out`."""
    heads, dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF_BLOCK)
    is_dim = dims < HALF
    mask = (heads < HEADS)[:, None] & is_dim[None, :]
    angles = token.to(tl.int64) * (2 * HALF) + dims
    cos_low = tl.load(cos + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angles + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    at = states + heads[:, None] * head_step + dims[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = out + heads[:, None] * out_head_step + dims[None, :]
    tl.store(to, low * cos_low - high * sin_low, mask=mask)
    tl.store(to + HALF, high * cos_high + low * sin_high, mask=mask)
