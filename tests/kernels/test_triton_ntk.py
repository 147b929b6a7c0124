"""Triton's evaluation and merge of an NTK term against its reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemserve_kernels import Partial, merge_ntk
from tests.kernels.twins import CLOSE, assert_caught, guarded, mutant, random, twin, wide

triton_ntk = twin("triton_ntk")


@dataclass(frozen=True, kw_only=True)
class Case:
    heads: int
    head_dim: int
    features: int
    inner: int
    queries: int
    shift: float = 0.0  # of the part's log-sum-exps
    sign: str = "positive"  # of k
    dtype: torch.dtype = torch.float32


CASES = [
    # first those that catch the most mutants
    Case(heads=3, head_dim=80, features=160, inner=4, queries=35, shift=5.0),
    Case(heads=2, head_dim=32, features=32, inner=16, queries=7, sign="mixed"),
    Case(heads=1, head_dim=32, features=64, inner=64, queries=1, sign="negative"),
    # e^ℓ overflows float32 at 88 and underflows at −104
    Case(heads=2, head_dim=32, features=32, inner=3, queries=5, shift=300.0),
    Case(heads=2, head_dim=32, features=32, inner=3, queries=5, shift=-300.0),
    Case(heads=1, head_dim=32, features=32, inner=3, queries=5, shift=-300.0, sign="zero"),
    Case(heads=1, head_dim=32, features=32, inner=3, queries=5, shift=-torch.inf),
    Case(heads=2, head_dim=128, features=128, inner=16, queries=17, dtype=torch.bfloat16),
    Case(heads=1, head_dim=256, features=256, inner=5, queries=3),
    Case(heads=2, head_dim=32, features=32, inner=16, queries=0),
]


def check(module: ModuleType, case: Case) -> None:
    shape = (case.heads, case.queries)
    query = wide(3 * random(*shape, case.head_dim, dtype=case.dtype), 1)
    out = wide(random(*shape, case.head_dim, seed=1, dtype=case.dtype), 1)
    lse = wide(random(*shape, seed=2) + case.shift, 1)
    z_a = random(case.heads, case.features, case.inner)
    z_b = random(case.heads, case.inner, case.head_dim)
    k = random(case.heads, case.features)
    sign = {"positive": k.abs(), "mixed": k + 0.1, "negative": -k.abs(), "zero": 0 * k}
    term = (z_a, z_b, sign[case.sign])
    with guarded():
        ours = module.merge_ntk([Partial(out, lse)], query, *term)
    theirs = merge_ntk([Partial(out, lse)], query, *term)
    assert ours.dtype == case.dtype
    # what the clamp leaves of a denominator may be a thousandth of its terms
    most = 1 if case.sign == "positive" else 30
    close = 3 * CLOSE * most if case.dtype == torch.float32 else 2e-2
    size = theirs.float().abs().amax(-1, keepdim=True).clamp_min(1)
    torch.testing.assert_close(ours / size, theirs / size, atol=close, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case) -> None:
    check(triton_ntk, case)


def test_a_step_of_decoding() -> None:
    """One query of each of several sequences: the part is laid out sequence by sequence."""
    query = random(3, 4, 32).transpose(0, 1)
    part = Partial(random(3, 4, 32, seed=1).transpose(0, 1), random(3, 4).T)
    term = (random(4, 32, 4), random(4, 4, 32), random(4, 32).abs())
    close = {"atol": 1e-4, "rtol": 1e-5}
    ours = triton_ntk.merge_ntk([part], query, *term)
    torch.testing.assert_close(ours, merge_ntk([part], query, *term), **close)


MUTATIONS: list[tuple[str, str, int | None]] = [
    (
        "tl.maximum(mass, LEAST * least, propagate_nan=tl.PropagateNan.ALL)",
        "mass",
        None,
    ),
    ("LEAST * least", "2 * LEAST * least", None),
    ("least += tl.sum(tl.abs(terms), 1)", "least += tl.sum(terms, 1)", None),
    ("mass += tl.sum(terms, 1)", "mass = tl.sum(terms, 1)", None),
    ("middle += ", "middle = ", None),
    # the features
    ("tl.where(is_mirrored[None, :], -z, z)", "z", None),
    ("columns >= HEAD_DIM", "columns > HEAD_DIM", None),
    ("tl.exp(tl.where(z >= 0, 0.0, z))", "0.0", None),
    ("* unit + 1.0", "* unit", None),
    ("* unit + 1.0", "+ 1.0", None),
    ("head_dim**-0.25", "head_dim**-0.2", None),
    ("range(0, features, FEATURES)", "range(0, features - FEATURES, FEATURES)", None),
    # where things lie
    ("places = head * features + columns", "places = columns", None),
    ("(head * inner + inners[:, None])", "inners[:, None]", None),
    ("head * query_head_step", "0", None),
    ("rows * lse_step", "rows * 0", None),
    ("rows[:, None] * attended_step", "0", None),
    ("is_column[:, None] & is_inner[None, :]", "is_column[:, None]", None),
    ("is_inner[:, None] & (dims <", "(inners >= 0)[:, None] & (dims <", None),
    ("mask = is_row[:, None] & is_dim", "mask = is_dim & (rows >= 0)[:, None]", None),
    # the merge in the log domain
    ("most = tl.maximum(size, term_size)", "most = size * 0", None),
    ("most = tl.maximum(size, term_size)", "most = term_size", None),
    ("most = tl.maximum(size, term_size)", "most = size", None),
    ("above += term_weight[:, None] * term", "above += term", None),
    ("below = weight + term_weight * held", "below = weight + held", None),
    ("below = weight + term_weight * held", "below = weight * held", None),
    ('tl.where(held == 0.0, float("-inf"), 0.0)', "held * 0", None),
    ("above / below[:, None]", "above / below[:, None] * 1.01", None),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("old", "new", "nth"), MUTATIONS)
def test_mutants_are_caught(old: str, new: str, nth: int | None, tmp_path: Path) -> None:
    assert_caught(mutant(triton_ntk, tmp_path, old, new, nth=nth), check, CASES)
