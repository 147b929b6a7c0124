"""Norms, gates and rotations in C++, beside plain torch in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gemserve_kernels.parts import LayerParts, open_parts
from tests.compiled_step import compiled_step, needs_compiler

pytestmark = needs_compiler
ROWS = (1, 2, 7, 65, 300)


@pytest.fixture(scope="module")
def parts() -> Iterator[LayerParts]:
    with compiled_step():
        yield open_parts()


BF16 = torch.bfloat16
TOLERANCES = {BF16: 2**-7, torch.float32: 2**-19}  # of a number
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [16, 48, 64, 576, 2048])
@both_dtypes
def test_norm(parts: LayerParts, dtype: torch.dtype, rows: int, width: int) -> None:
    states, weight = drawn(1, rows, width, dtype=dtype), drawn(width, seed=1, dtype=dtype)
    wide = states.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    got = parts.norm(states, weight, 1e-5)
    torch.testing.assert_close(got.double(), exact, rtol=TOLERANCES[dtype], atol=0)


def test_a_norm_of_rows_that_lie_apart(parts: LayerParts) -> None:
    """Heads of queries are a transposed view."""
    states, weight = drawn(1, 5, 4, 32).transpose(1, 2), drawn(32, seed=1)
    expected = parts.norm(states.contiguous(), weight, 1e-5)
    assert torch.equal(parts.norm(states, weight, 1e-5), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@both_dtypes
def test_gate(parts: LayerParts, dtype: torch.dtype, rows: int, activation: str) -> None:
    gate, up = drawn(1, rows, 192, dtype=dtype) * 4, drawn(1, rows, 192, seed=1, dtype=dtype)
    known = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    exact = known[activation](gate.double()) * up.double()
    got = parts.gate(gate.clone(), up, activation)
    torch.testing.assert_close(got.double(), exact, rtol=TOLERANCES[dtype], atol=1e-6)


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@both_dtypes
def test_rotation(parts: LayerParts, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Heads as layers make them: a view of what a projection gives."""
    states = drawn(tokens, 3, width, dtype=dtype).transpose(0, 1)
    before = states.clone()
    cos, sin = (drawn(tokens, width, seed=seed, dtype=dtype) for seed in (1, 2))
    low, high = states.double().chunk(2, -1)
    exact = states.double() * cos.double() + torch.cat([-high, low], -1) * sin.double()
    got = parts.rotate(states, cos, sin)
    torch.testing.assert_close(got.double(), exact, rtol=TOLERANCES[dtype], atol=1e-6)
    assert torch.equal(states, before)


def test_heads_that_are_part_of_a_larger_matrix(parts: LayerParts) -> None:
    whole = drawn(9, 6, 64)
    cos, sin = drawn(9, 64, seed=1), drawn(9, 64, seed=2)
    for heads in (whole[:, :4].transpose(0, 1), whole[:, 4:].transpose(0, 1)):
        expected = parts.rotate(heads.contiguous(), cos, sin)
        assert torch.equal(parts.rotate(heads, cos, sin), expected)


@both_dtypes
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    parts: LayerParts, dtype: torch.dtype
) -> None:
    states, weight = drawn(1, 300, 576, dtype=dtype), drawn(576, seed=1, dtype=dtype)
    up, angles = drawn(1, 300, 576, seed=2, dtype=dtype), drawn(300, 64, seed=3, dtype=dtype)
    heads = states.view(300, 9, 64).transpose(0, 1)
    normed = parts.norm(states, weight, 1e-5)
    gated = parts.gate(states.clone(), up, "silu")
    rotated = parts.rotate(heads, angles, angles)
    for first, count in ((0, 1), (17, 2), (200, 100)):
        some = slice(first, first + count)
        assert torch.equal(parts.norm(states[:, some], weight, 1e-5), normed[:, some])
        alone = parts.gate(states[:, some].clone(), up[:, some], "silu")
        assert torch.equal(alone, gated[:, some])
        alone = parts.rotate(heads[:, some], angles[some], angles[some])
        assert torch.equal(alone, rotated[:, some])


def test_numbers_that_are_none_are_not_hidden(parts: LayerParts) -> None:
    states, weight = drawn(1, 3, 64), drawn(64, seed=1)
    states[0, 1, 5] = torch.nan
    normed = parts.norm(states, weight, 1e-5)
    assert normed[0, 1].isnan().all()
    assert not normed[0, ::2].isnan().any()
    gated = parts.gate(drawn(1, 3, 64, seed=2), states, "silu")
    assert gated.isnan().nonzero().tolist() == [[0, 1, 5]]
