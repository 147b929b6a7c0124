"""Triton's norms, gates and rotations against plain torch in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gemserve_kernels.cpu_step import ACTIVATIONS
from tests.kernels.twins import DEVICE, assert_caught, guarded, mutant, random, twin

triton_parts = twin("triton_parts")
BFLOAT, HALF = torch.bfloat16, torch.float16
PLAIN = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """`got` is rounded once. What cancels out in a sum has the error of its terms."""
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class Norm:
    rows: tuple[int, ...]
    width: int
    dtype: torch.dtype = BFLOAT
    eps: float = 1e-5
    size: float = 1.0
    is_view: bool = False  # of heads within tokens


NORMS = [
    Norm(rows=(1,), width=1),
    Norm(rows=(1, 3), width=77, eps=0.3),
    Norm(rows=(1, 65), width=576, dtype=HALF),
    Norm(rows=(2, 7), width=2048, size=1e-3),
    Norm(rows=(300,), width=16, dtype=HALF, size=100.0),
    Norm(rows=(1, 4, 5), width=33, is_view=True),
    Norm(rows=(0,), width=64),
]


def check_norm(module: ModuleType, case: Norm) -> None:
    states = random(*case.rows, case.width, dtype=case.dtype).mul_(case.size)
    weight = random(case.width, seed=1, dtype=case.dtype)
    if case.is_view:
        states = states.transpose(1, 2)
    exact = states.double()
    mean = exact.pow(2).mean(-1, keepdim=True)
    exact = exact * torch.rsqrt(mean + case.eps) * weight.double()
    with guarded():
        got = module.TritonParts(DEVICE.type).norm(states, weight, case.eps)
    close(got, exact, case.dtype)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm(case: Norm) -> None:
    check_norm(triton_parts, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ WIDTH + eps", "/ BLOCK + eps"),
        ("/ WIDTH + eps", "/ WIDTH"),
        ("x * by * factor", "x * by"),
        ("is_column = columns < WIDTH", "is_column = columns <= WIDTH"),
        ("is_column = columns < WIDTH", "is_column = columns < WIDTH - 1"),
        ("tl.program_id(0).to(tl.int64) * WIDTH", "tl.program_id(0).to(tl.int64) * (WIDTH - 1)"),
        ("states, weight, width = states.contiguous()", "states, weight, width = states"),
    ],
)
def test_mutants_of_norm_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert_caught(mutant(triton_parts, tmp_path, old, new), check_norm, NORMS)


@dataclass(frozen=True, kw_only=True)
class Gate:
    shape: tuple[int, ...]
    activation: str = "silu"
    dtype: torch.dtype = BFLOAT
    size: float = 4.0
    is_joined: bool = False  # gate and up are halves of one matrix


GATES = [
    *(
        Gate(shape=shape, activation=activation, dtype=dtype)
        for activation in ACTIVATIONS
        for shape, dtype in (((1, 1), BFLOAT), ((1, 7, 192), HALF), ((3, 1001), BFLOAT))
    ),
    Gate(shape=(2, 1024), size=1e4),  # exponentials overflow
    Gate(shape=(2, 1024), activation="gelu_tanh", size=1e4),
    Gate(shape=(5, 96), is_joined=True),
    Gate(shape=(0, 96)),
]


def check_gate(module: ModuleType, case: Gate) -> None:
    gate = random(*case.shape, dtype=case.dtype).mul_(case.size)
    up = random(*case.shape, seed=1, dtype=case.dtype)
    if case.is_joined:
        width = case.shape[-1] // 2
        gate, up = gate[..., :width], gate[..., width:]
    exact, before = PLAIN[case.activation](gate.double()) * up.double(), up.clone()
    got = module.TritonParts(DEVICE.type).gate(gate, up, case.activation)
    close(got, exact, case.dtype)
    assert torch.equal(up, before)


@pytest.mark.parametrize("case", GATES, ids=str)
def test_gate(case: Gate) -> None:
    check_gate(triton_parts, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if not IS_SILU", "if IS_SILU"),
        ("0.044715", "0.0"),
        ("places < count", "places < count - 1"),
        ("triton.cdiv(count, _PRODUCTS)", "max(1, count // _PRODUCTS)"),
        ("activated * other", "activated"),
        ("* BLOCK + tl.arange(0, BLOCK)", "+ tl.arange(0, BLOCK)"),
    ],
)
def test_mutants_of_gate_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert_caught(mutant(triton_parts, tmp_path, old, new), check_gate, GATES)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    heads: int
    kv_heads: int
    tokens: int
    width: int
    dtype: torch.dtype = BFLOAT


ROTATIONS = [
    Rotation(heads=1, kv_heads=1, tokens=1, width=2),
    Rotation(heads=9, kv_heads=3, tokens=7, width=64),
    Rotation(heads=5, kv_heads=5, tokens=2, width=80, dtype=HALF),
    Rotation(heads=12, kv_heads=1, tokens=33, width=6),
    Rotation(heads=4, kv_heads=2, tokens=3, width=256),
    Rotation(heads=2, kv_heads=3, tokens=2, width=2048, dtype=HALF),
    Rotation(heads=4, kv_heads=2, tokens=0, width=32),
]


def check_rotation(module: ModuleType, case: Rotation) -> None:
    """Queries are heads within tokens, as projections make them. Other heads lie behind all."""
    tokens, width, dtype = case.tokens, case.width, case.dtype
    q = random(tokens, case.heads + 1, width, dtype=dtype)[:, :-1].transpose(0, 1)
    k = random(case.kv_heads + 1, tokens, width, seed=1, dtype=dtype)[:-1]
    cos, sin = (random(tokens, width, seed=seed, dtype=dtype) for seed in (2, 3))
    with guarded():
        got = module.TritonParts(DEVICE.type).rotate_both(q, k, cos, sin)
    for states, rotated in zip((q, k), got, strict=True):
        low, high = states.double().chunk(2, -1)
        exact = states.double() * cos.double() + torch.cat([-high, low], -1) * sin.double()
        close(rotated, exact, dtype)


@pytest.mark.parametrize("case", ROTATIONS, ids=str)
def test_rotation(case: Rotation) -> None:
    check_rotation(triton_parts, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("low * cos_low - high * sin_low", "low * cos_low + high * sin_low"),
        ("high * cos_high + low * sin_high", "high * cos_high - low * sin_high"),
        ("high * cos_high", "high * cos_low"),
        ("low * sin_high", "low * sin_low"),
        ("token.to(tl.int64) * (2 * HALF)", "token.to(tl.int64) * HALF"),
        ("dims < HALF\n", "dims < HALF - 1\n"),
        ("dims < HALF\n", "dims <= HALF\n"),
        ("heads < HEADS", "heads <= HEADS"),
        ("block * ROWS +", "ROWS +"),
        ("block - Q_BLOCKS", "block"),
        ("block < Q_BLOCKS", "block <= Q_BLOCKS"),
        ("q + token * q_token", "q"),
        ("k + token * k_token", "k"),
        ("heads[:, None] * head_step", "heads[:, None] * (2 * HALF)"),
        ("q_blocks + triton.cdiv(kv_heads, rows)", "q_blocks + 1"),
    ],
)
def test_mutants_of_rotation_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert_caught(mutant(triton_parts, tmp_path, old, new), check_rotation, ROTATIONS)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    parts = triton_parts.TritonParts(DEVICE.type)
    states, weight = random(40, 96, dtype=BFLOAT), random(96, seed=1, dtype=BFLOAT)
    up, angles = random(40, 96, seed=2, dtype=BFLOAT), random(40, 32, seed=3, dtype=BFLOAT)
    q, k = states.view(40, 3, 32).transpose(0, 1), up.view(40, 3, 32).transpose(0, 1)
    normed, gated = parts.norm(states, weight, 1e-5), parts.gate(states.clone(), up, "silu")
    rotated = parts.rotate_both(q, k, angles, angles)
    for first, count in ((0, 1), (17, 2), (20, 20)):
        some = slice(first, first + count)
        assert torch.equal(parts.norm(states[some], weight, 1e-5), normed[some])
        assert torch.equal(parts.gate(states[some].clone(), up[some], "silu"), gated[some])
        alone = parts.rotate_both(q[:, some], k[:, some], angles[some], angles[some])
        for one, whole in zip(alone, rotated, strict=True):
            assert torch.equal(one, whole[:, some])


def test_numbers_that_are_none_are_not_hidden() -> None:
    parts = triton_parts.TritonParts(DEVICE.type)
    states, weight = random(3, 64, dtype=BFLOAT), random(64, seed=1, dtype=BFLOAT)
    states[1, 5] = torch.nan
    normed = parts.norm(states, weight, 1e-5)
    assert normed[1].isnan().all()
    assert not normed[::2].isnan().any()
    gated = parts.gate(random(3, 64, seed=2, dtype=BFLOAT), states, "silu")
    assert gated.isnan().nonzero().tolist() == [[1, 5]]
