"""Products of FP8 numbers (e4m3), with one scale for each row of either factor.

A row's scale makes its largest number the largest that e4m3 has, so a token with large activations
does not cost the others their precision.
"""

from __future__ import annotations

import torch

_LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 1e-12  # a row of zeros stays one


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [rows, columns] and float32 scales [rows, 1], whose product is about `rows`."""
    rows = rows.contiguous()  # as the hardware's products want them
    # a norm, not abs().amax(): no copy of all rows in between
    largest = torch.linalg.vector_norm(
        rows, float("inf"), dim=-1, keepdim=True, dtype=torch.float32
    )
    scales = (largest / _LARGEST).clamp(min=_SMALLEST_SCALE)
    return (rows / scales).to(torch.float8_e4m3fn), scales


def scaled_product(
    left: torch.Tensor,
    left_scales: torch.Tensor,
    right: torch.Tensor,
    right_scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """left [rows, inner] times right [columns, inner] transposed: [rows, columns] of `dtype`.

    Both as `quantise_rows` makes them; `inner` and `columns` multiples of 16. Sums are rounded to
    bfloat16, whatever `dtype` is. On CUDA: compute capability 9.0 or newer.
    """
    product = torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scales,
        scale_b=right_scales.t(),
        out_dtype=torch.bfloat16,
    )
    return product.to(dtype)


def reference_scaled_product(
    left: torch.Tensor,
    left_scales: torch.Tensor,
    right: torch.Tensor,
    right_scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same in float32, for any shape, on any device."""
    rows = left.float() * left_scales
    columns = right.float() * right_scales
    return (rows @ columns.t()).to(torch.bfloat16).to(dtype)
