"""Triton's pooling against its reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemserve_kernels import pooled
from tests.kernels.twins import assert_caught, guarded, mutant, random, twin

triton_pooling = twin("triton_pooling")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, ...]
    kind: str
    width: int = 5
    dtype: torch.dtype = torch.float32


CASES = [
    Case(shape=(3, 259), kind="mean"),
    Case(shape=(2, 259), kind="max", width=17, dtype=torch.float64),  # ranks, as sieve pools them
    Case(shape=(1,), kind="mean"),
    Case(shape=(3,), kind="max", width=9),
    Case(shape=(7,), kind="max", width=1),
]


def check(module: ModuleType, case: Case) -> None:
    # below zero, so that a zero from outside would win a maximum
    scores = random(*case.shape, dtype=case.dtype).abs_().neg_().sub_(1)
    with guarded():
        ours = module.pooled(scores, kind=case.kind, width=case.width)
    theirs = pooled(scores, kind=case.kind, width=case.width)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case) -> None:
    check(triton_pooling, case)


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_nan_is_not_hidden(kind: str) -> None:
    scores = random(20)
    scores[7] = torch.nan
    for pool in (pooled, triton_pooling.pooled):
        assert pool(scores, kind=kind).isnan().nonzero()[:, 0].tolist() == [5, 6, 7, 8, 9]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling='median'"):
        triton_pooling.pooled(random(4), kind="median")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(-reach, reach + 1)", "range(-reach, reach)"),
        ("range(-reach, reach + 1)", "range(1 - reach, reach + 1)"),
        ("(2 * reach + 1)", "(2 * reach)"),
        ("(at >= 0) & ", ""),
        (" & (at < keys)", ""),
        ('0.0 if IS_MEAN else float("-inf")', "0.0"),
        ("row = tl.program_id(1)", "row = 0 * tl.program_id(1)"),
        ("total, mask=columns < keys", "total"),
        ("width // 2", "2"),
    ],
)
def test_mutants_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert_caught(mutant(triton_pooling, tmp_path, old, new), check, CASES)
