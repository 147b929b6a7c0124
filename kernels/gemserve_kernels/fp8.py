"""Matrix products in FP8 (e4m3), with one scale for each row of either factor.

A row's scale makes its largest number the largest number of e4m3. So a token with large activations
does not cost the others their precision.
"""

from __future__ import annotations

import torch

_LARGEST = 448.0  # the largest number of e4m3
_SMALLEST_SCALE = 1e-12  # a row of zeros must not be divided by 0


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 [rows, columns], with float32 scales [rows, 1].

    The product of both is about `rows`.
    """
    rows = rows.contiguous()  # the hardware's products need scales like this
    # a norm makes no copy of all rows, which abs().amax() does
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

    Both factors come from `quantise_rows`. `inner` and `columns` must be multiples of 16. Sums are
    rounded to bfloat16, whatever `dtype` is. CUDA needs compute capability 9.0 or newer.
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
    """The same product in float32, for any shape and on any device."""
    rows = left.float() * left_scales
    columns = right.float() * right_scales
    return (rows @ columns.t()).to(torch.bfloat16).to(dtype)
