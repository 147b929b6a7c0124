"""FP8 products: how far they may be off, and that hardware's and reference agree."""

from __future__ import annotations

import pytest
import torch

from gemserve_kernels.fp8 import quantise_rows, reference_scaled_product, scaled_product

SHAPES = [(1, 16, 16), (33, 64, 48), (128, 512, 1536)]


def random(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_is_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    """Three bits of mantissa; below 2⁻⁶ of e4m3's own scale the steps are 2⁻⁹."""
    rows = random(50, 70, 0, dtype)
    values, scales = quantise_rows(rows)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (values.shape, scales.shape) == ((50, 70), (50, 1))
    restored = values.float() * scales
    bound = (rows.float().abs() / 16).maximum(scales * 2**-10) * 1.001
    assert ((restored - rows.float()).abs() <= bound).all()


def test_a_row_does_not_cost_others_their_precision() -> None:
    """With one scale for all rows the small ones would come out as zeros."""
    rows = random(2, 64, 1, torch.float32) * torch.tensor([[1e6], [1e-6]])
    values, scales = quantise_rows(rows)
    error = (values.float() * scales - rows).norm(dim=-1) / rows.norm(dim=-1)
    assert (error < 0.04).all()


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    values, scales = quantise_rows(torch.zeros(3, 16))
    assert not (values.float() * scales).any()
    broken = torch.ones(2, 16)
    broken[1, 3] = float("nan")
    values, scales = quantise_rows(broken)
    out = reference_scaled_product(values, scales, values[:1], scales[:1], torch.float32)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_product_is_that_of_its_twin(
    rows: int, inner: int, columns: int, dtype: torch.dtype
) -> None:
    """On the CPU torch has the product, too: with the arguments as they are on a GPU."""
    left = quantise_rows(random(rows, inner, 2, dtype))
    right = quantise_rows(random(columns, inner, 3, dtype))
    actual = scaled_product(*left, *right, dtype)
    expected = reference_scaled_product(*left, *right, dtype)
    assert actual.dtype == dtype
    assert actual.shape == (rows, columns)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_product_on_a_gpu_is_that_of_its_twin(
    rows: int, inner: int, columns: int, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("compute capability below 9.0")
    left = quantise_rows(random(rows, inner, 2, dtype).cuda())
    right = quantise_rows(random(columns, inner, 3, dtype).cuda())
    actual = scaled_product(*left, *right, dtype)
    expected = reference_scaled_product(*left, *right, dtype)
    # the hardware adds with fewer bits than float32
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("change", ["left scales", "right scales", "transposed"])
def test_a_wrong_product_is_seen(change: str) -> None:
    """What the tolerance above must not let pass."""
    left = quantise_rows(random(32, 32, 4, torch.float32))
    right = quantise_rows(random(32, 32, 5, torch.float32))
    expected = reference_scaled_product(*left, *right, torch.float32)
    if change == "left scales":
        left = (left[0], left[1].flip(0))
    elif change == "right scales":
        right = (right[0], right[1].flip(0))
    else:
        right = (right[0].t().contiguous(), right[1])
    actual = scaled_product(*left, *right, torch.float32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-4)
