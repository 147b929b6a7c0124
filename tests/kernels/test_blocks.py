"""Weights in blocks have the numbers of their format, and their products are sums of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from gemserve_kernels import blocks as module
from gemserve_kernels import native_library
from gemserve_kernels.blocks import FORMATS, BlockFormat, Blocks, BlockWeight, stored_bytes
from tests.compiled_step import compiled_step, needs_compiler

pytestmark = needs_compiler
BF16 = torch.bfloat16
# what processors lack: nothing, AVX-512, and all vectors of more than four numbers
PROCESSORS = {"own": "", "avx2": "-mno-avx512f", "plain": "-mno-avx"}
# where a file's block has its float16 factors
FACTORS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SHAPES = [(1, 1), (15, 1), (16, 2), (17, 3), (100, 2)]  # outputs, and blocks of inputs


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On processors with tiles, too, products are sums over bytes unless a test says otherwise."""
    monkeypatch.setattr(module, "_has_tiles", lambda: False)
    with compiled_step():
        yield


@pytest.fixture(params=PROCESSORS)
def _processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} {PROCESSORS[request.param]}")
    native_library.forget_libraries()


def draw(kind: BlockFormat, outs: int, ins: int, *, seed: int = 0) -> torch.Tensor:
    """A file's bytes of random blocks, whose factors are of usual size."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (outs * ins // kind.inputs, kind.file_bytes), dtype=np.uint8)
    for place in FACTORS.get(kind.name, (0,)):
        factors = (rng.standard_normal(len(raw)) * 0.01).astype(np.float16)
        raw[:, place : place + 2] = factors.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(raw.reshape(-1))


def defined(kind: BlockFormat, raw: torch.Tensor, ins: int) -> torch.Tensor:
    numbers = quants.dequantize(raw.numpy(), GGMLQuantizationType(kind.type_id))
    return torch.from_numpy(numbers).reshape(-1, ins)


def make(kind: BlockFormat, outs: int, ins: int) -> tuple[Blocks, torch.Tensor]:
    raw = draw(kind, outs, ins)
    return Blocks(kind, raw, outs, ins), defined(kind, raw, ins)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as bytes with a scale for every 32 of them, in float64."""
    few = x.double().unflatten(-1, (-1, 32))
    scale = few.abs().amax(-1, keepdim=True) / 127
    return (few / scale.clamp(min=1e-300)).round().mul(scale).flatten(-2)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("_processor")
def test_numbers_are_those_of_the_format(kind: BlockFormat) -> None:
    for outs, count in SHAPES:
        made, exact = make(kind, outs, count * kind.inputs)
        assert torch.equal(made.numbers(torch.float32), exact)
        assert torch.equal(made.numbers(BF16), exact.bfloat16())
        ids = torch.tensor([[outs - 1, 0], [outs // 2, 0]])
        assert torch.equal(made.rows(ids, torch.float32), exact[ids])
        assert torch.equal(made.rows(ids, BF16), exact[ids].bfloat16())
        assert made.nbytes == stored_bytes(kind, outs, count * kind.inputs)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("_processor")
def test_any_bytes_are_numbers_or_none(kind: BlockFormat) -> None:
    """Factors of any size, also infinite ones and those that are no numbers."""
    outs, ins = 40, 2 * kind.inputs
    drawn = np.random.default_rng(1).integers(
        0, 256, outs * ins // kind.inputs * kind.file_bytes, dtype=np.uint8
    )
    raw = torch.from_numpy(drawn)
    with np.errstate(all="ignore"):
        exact = defined(kind, raw, ins)
    assert same(Blocks(kind, raw, outs, ins).numbers(torch.float32), exact)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("_processor")
def test_products_are_sums_over_bytes(kind: BlockFormat, threads: int) -> None:
    outs, ins = 100, 3 * kind.inputs
    made, exact = make(kind, outs, ins)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65, ins, generator=generator) * torch.logspace(-3, 3, 65)[:, None]
    bias = torch.randn(outs, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([made.products(row[None], None) for row in x])
        expected = rounded(x) @ exact.double().T
        size = (rounded(x).abs() @ exact.double().abs().T) * 1e-5
        assert ((alone - expected).abs() <= size).all()
        for rows in range(1, 66):
            assert torch.equal(made.products(x[:rows], None), alone[:rows])
        assert torch.equal(made.products(x[:3], bias), alone[:3] + bias)
        half = made.products(x.bfloat16(), None)
        wide = made.products(x.bfloat16().float(), None)
        assert torch.equal(half, wide.bfloat16())
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("_processor")
def test_what_is_not_finite_stays_in_its_row() -> None:
    made, _ = make(FORMATS[5], 20, 512)
    x = torch.randn(4, 512)
    clean = made.products(x, None)
    x[1, 100], x[2, 511] = float("nan"), float("inf")
    found = made.products(x, None)
    assert found[1].isnan().all()
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 3]], clean[[0, 3]])


@pytest.mark.usefixtures("_processor")
def test_a_block_of_tiny_numbers_is_zero() -> None:
    """Their inverse is infinite, and formats with minima made infinity of it."""
    for kind in FORMATS:
        made, _ = make(kind, 20, 2 * kind.inputs)
        x = torch.randn(1, 2 * kind.inputs)
        zeros, tiny = x.clone(), x.clone()
        zeros[:, :32], tiny[:, :32] = 0, 2e-37
        assert torch.equal(made.products(tiny, None), made.products(zeros, None))


@pytest.mark.parametrize("outs", [64, 100, 1088])
def test_products_by_panels_are_those_of_bfloat16(
    outs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors with tiles, whose products in bfloat16 are faster."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 in oneDNN")
    monkeypatch.setattr(module, "_has_tiles", lambda: True)
    made, exact = make(FORMATS[5], outs, 512)
    x, bias = torch.randn(70, 512).bfloat16(), torch.randn(outs).bfloat16()
    found = made.products(x, bias)
    expected = functional.linear(x, exact.bfloat16(), bias)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_modules_read_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, exact = make(FORMATS[4], 48, 64)
    weight = BlockWeight(made, torch.float32)
    linear = torch.nn.Linear(64, 48)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    embedding = torch.nn.Embedding(48, 64)
    embedding.weight = linear.weight
    x = torch.randn(2, 3, 64)
    with torch.inference_mode():
        assert torch.equal(linear(x), made.products(x, linear.bias))
        assert torch.equal(embedding(torch.tensor([3, 5])), exact[[3, 5]])
        with pytest.raises(IndexError, match="ids from 3 to 48 of 48"):
            embedding(torch.tensor([3, 48]))
    monkeypatch.delattr(Blocks, "numbers")  # a start would compute all of a model twice
    assert isinstance(linear.to("cpu").weight, BlockWeight)
    assert isinstance(linear.weight.detach(), BlockWeight)
    assert linear.weight.shape == (48, 64)
    assert linear.weight.dtype == torch.float32


def test_everything_else_is_done_with_numbers() -> None:
    made, exact = make(FORMATS[4], 48, 64)
    weight: Any = BlockWeight(made, torch.float32)
    with torch.inference_mode():
        assert torch.equal(torch.cat(weight.split(10)), exact)
        assert torch.equal(weight[5], exact[5])
    assert torch.equal(weight.flatten()[::7], exact.flatten()[::7])
    assert torch.equal(
        weight.numbers_at(torch.tensor([0, 65, 3071])), exact.flatten()[[0, 65, 3071]]
    )
    assert torch.equal(torch.cat(list(weight.pieces(16))), exact)
    assert torch.equal(weight + 1, exact + 1)
    assert "Q8_0" in repr(weight)


def test_another_layout_of_packed_weights_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 in oneDNN")

    def refuse(*_: object) -> None:
        raise ValueError("another layout")

    monkeypatch.setattr(module, "_has_tiles", lambda: True)
    monkeypatch.setattr(module, "check_layout", refuse)
    monkeypatch.setattr(module, "_PANELS", threading.local())
    made, exact = make(FORMATS[5], 128, 256)
    x = torch.randn(70, 256).bfloat16()
    expected = functional.linear(x, exact.bfloat16())
    torch.testing.assert_close(made.products(x, None), expected, rtol=2e-2, atol=2e-2)


def test_what_would_be_lost_is_refused() -> None:
    """Gradients, and numbers that are written."""
    weight = BlockWeight(make(FORMATS[4], 48, 64)[0], torch.float32)
    with pytest.raises(TypeError, match="no gradients: load the model with weights=dense"):
        functional.linear(torch.randn(2, 64, requires_grad=True), weight)
    for write in (
        lambda: weight.copy_(torch.zeros(48, 64)),
        lambda: weight.__setitem__(0, 1.0),
        weight.data_ptr,
        weight.untyped_storage,
    ):
        with pytest.raises(TypeError, match="has no numbers in memory"):
            write()


def test_other_sizes_are_refused() -> None:
    raw = draw(FORMATS[5], 2, 256)
    with pytest.raises(ValueError, match="288 bytes of Q4_K for \\[3, 256\\]"):
        Blocks(FORMATS[5], raw, 3, 256)
    with pytest.raises(ValueError, match="for \\[4, 128\\]"):
        Blocks(FORMATS[5], raw, 4, 128)
    with pytest.raises(ValueError, match="outputs from 8 on"):
        make(FORMATS[4], 48, 64)[0].part(8, 16)
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        make(FORMATS[4], 48, 64)[0].numbers(torch.float16)
