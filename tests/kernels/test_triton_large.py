"""Triton's kernels at Llama-3.1-8B's sizes, and beyond addresses of 32 bits: on a GPU only."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import test_triton_attention_scores as scores
from tests.kernels import test_triton_decode as decode
from tests.kernels import test_triton_kv_copy as kv_copy
from tests.kernels import test_triton_ntk as ntk
from tests.kernels.twins import twin

pytestmark = pytest.mark.gpu

BFLOAT = torch.bfloat16
LONG, MANY = (100_003, 1_024), tuple(range(100, 356))
FAR_ROW = (1 << 24) + 4096  # of 128 numbers: 2³¹ and some


@pytest.mark.parametrize(("window", "keys"), [(4, 100_003), (32, 32_768)])
def test_scores(window: int, keys: int) -> None:
    case = scores.Case(
        heads=32, kv_heads=8, head_dim=128, window=window, keys=keys, dtype=BFLOAT, split=1024
    )
    scores.check(twin("triton_attention_scores"), case)


@pytest.mark.parametrize(
    ("lengths", "first_row"), [(LONG, 3), (MANY, 3), ((1000, 33), FAR_ROW)], ids=str
)
def test_decode(lengths: tuple[int, ...], first_row: int) -> None:
    case = decode.Case(
        heads=32,
        kv_heads=8,
        head_dim=128,
        lengths=lengths,
        dtype=BFLOAT,
        programs=512,
        first_row=first_row,
    )
    decode.check(twin("triton_decode"), case)


@pytest.mark.parametrize(
    ("lengths", "first_row"), [(LONG, 3), (MANY, 3), ((1000, 33), FAR_ROW)], ids=str
)
def test_writes(lengths: tuple[int, ...], first_row: int) -> None:
    case = kv_copy.Write(
        kv_heads=8, head_dim=128, lengths=lengths, dtype=BFLOAT, first_row=first_row
    )
    kv_copy.check_write(twin("triton_kv_copy"), case)


@pytest.mark.parametrize(("layers", "tokens"), [(2, 100_003), (9, 131_072)])
def test_gathers(layers: int, tokens: int) -> None:
    case = kv_copy.Gather(
        layers=layers, kv_heads=8, head_dim=128, tokens=tokens, kept=1024, dtype=BFLOAT
    )
    kv_copy.check_gather(twin("triton_kv_copy"), case)


def test_merges() -> None:
    case = ntk.Case(heads=32, head_dim=128, features=128, inner=16, queries=2048, dtype=BFLOAT)
    ntk.check(twin("triton_ntk"), case)
