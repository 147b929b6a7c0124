"""Triton's window scores against their reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from gemserve_kernels import attention_scores
from tests.kernels.twins import CLOSE, DEVICE, assert_caught, guarded, mutant, random, twin, wide

triton_attention_scores, triton_blocks = twin("triton_attention_scores"), twin("triton_blocks")


@dataclass(frozen=True, kw_only=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    keys: int
    softcap: float | None = None
    scale: float = 0.3
    dtype: torch.dtype = torch.float32
    split: int = 64  # keys of a piece
    close: float = CLOSE


CASES = [
    # first those that catch the most mutants
    Case(heads=6, kv_heads=2, head_dim=80, window=3, keys=67, split=32),
    Case(heads=4, kv_heads=4, head_dim=32, window=5, keys=67, softcap=2.0),
    Case(heads=2, kv_heads=1, head_dim=32, window=64, keys=65),  # two blocks of rows
    # scores near ±150, whose exponentials overflow
    Case(heads=2, kv_heads=1, head_dim=32, window=2, keys=70, scale=10.0, close=30 * CLOSE),
    Case(heads=1, kv_heads=1, head_dim=32, window=1, keys=1),
    Case(heads=1, kv_heads=1, head_dim=64, window=1, keys=63, split=1024),
    Case(heads=8, kv_heads=1, head_dim=96, window=2, keys=33),
    Case(heads=8, kv_heads=2, head_dim=128, window=16, keys=65, dtype=torch.bfloat16),
    Case(heads=2, kv_heads=2, head_dim=256, window=37, keys=37, dtype=torch.float16),
]


def check(module: ModuleType, case: Case) -> None:
    query = wide(random(case.heads, case.window, case.head_dim, dtype=case.dtype), 1)
    key = wide(random(case.kv_heads, case.keys, case.head_dim, dtype=case.dtype), 1)
    options = {"scale": case.scale, "softcap": case.softcap}
    close = {"atol": case.close, "rtol": case.close}
    last = torch.arange(case.keys - case.window, case.keys, device=DEVICE)
    apart = torch.linspace(
        0, case.keys - 1, case.window, device=DEVICE
    ).long()  # rows anywhere in the prompt
    for rows in (last, apart):
        with guarded(), mock.patch.object(module, "_SPLIT", case.split):
            ours = module.largest_attention(query, key, rows, **options)
        theirs = attention_scores.largest_attention(query, key, rows, **options)
        torch.testing.assert_close(ours, theirs, **close)
    with guarded(), mock.patch.object(module, "_SPLIT", case.split):
        grouped = module.grouped_probabilities(query, key, **options)
    torch.testing.assert_close(
        grouped, attention_scores.grouped_probabilities(query, key, **options), **close
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case) -> None:
    check(triton_attention_scores, case)


def test_nan_is_not_hidden() -> None:
    """Whoever chooses by the scores asks whether they are finite."""
    query, key = random(2, 3, 32), random(1, 70, 32)
    key[0, 5, 7] = torch.nan
    rows = torch.tensor([10, 20, 69], device=DEVICE)
    assert bool(
        triton_attention_scores.largest_attention(query, key, rows, scale=0.3).isnan().all()
    )
    assert bool(triton_attention_scores.grouped_probabilities(query, key, scale=0.3).isnan().all())


MUTATIONS: list[tuple[str, str, int | None]] = [
    # scale
    ("score_block(q, k, scale,", "score_block(q, k, scale * 1.01,", 0),
    ("score_block(q, k, scale,", "score_block(q, k, scale * 1.01,", 1),
    ("score_block(q, k, scale,", "score_block(q, k, scale * 1.01,", 2),
    # what a row sees
    ("columns[None, :] <= last_seen[:, None], scores", "columns[None, :] >= 0, scores", None),
    ("<= last_seen[:, None], scores", "< last_seen[:, None], scores", None),
    ("last_seen[:, None]) & is_row", "last_seen[:, None] - 1) & is_row", None),
    ("last_seen[:, None]) & is_row", "last_seen[:, None] + 1) & is_row", None),
    ("positions + own", "positions + own * 0", None),
    ("positions + rows", "positions + rows * 0", None),
    ("<= (keys - window + own)", "<= 1 + (keys - window + own)", None),
    ("<= (keys - window + own)", "< (keys - window + own)", None),
    (" & is_row[:, None]", "", 0),
    (" & is_row[:, None]", "", 1),
    # the log-sum-exp
    ('shift = tl.where(higher == float("-inf"), 0.0, higher)', "shift = higher * 0", None),
    ("total * tl.exp(largest - shift)", "total", None),
    ("largest + tl.log(", "tl.log(", None),
    ("splits = triton.cdiv(keys, _SPLIT)", "splits = max(1, keys // _SPLIT)", None),
    ("lse.logsumexp(0)", "lse.amax(0)", None),
    # heads
    ("kv_head * group + rows // num_rows", "rows // num_rows * kv_heads + kv_head", 0),
    ("kv_head * group + rows // num_rows", "group - 1 - rows // num_rows + kv_head * group", 0),
    ("head = kv_head * group + member", "head = member * kv_heads + kv_head", None),
    ("for member in range(group)", "for member in range(1, group)", None),
    ("kv_head * group * window + rows", "rows", None),
    # what is made of probabilities
    ("best = tl.maximum(best, shares, propagate_nan=tl.PropagateNan.ALL)", "best += shares", None),
    ("tl.max(values, 0)", "tl.sum(values, 0)", None),
    ("total += tl.sum(shares, 0)", "total = tl.sum(shares, 0)", None),
    ("_largest_or_nan(best), mask=is_key", "_largest_or_nan(best)", None),
    ("+ columns, total, mask=is_key", "+ columns, total", None),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("old", "new", "nth"), MUTATIONS)
def test_mutants_are_caught(old: str, new: str, nth: int | None, tmp_path: Path) -> None:
    assert_caught(mutant(triton_attention_scores, tmp_path, old, new, nth=nth), check, CASES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("input_precision=PRECISION) * scale", "input_precision=PRECISION)"),
        ("if SOFTCAP is not None", "if False"),
        ("scores / SOFTCAP", "scores"),
        ("-2.0 * tl.abs(ratio)", "-tl.abs(ratio)"),
        ("-bounded, bounded", "bounded, bounded"),
        (" & (dims < HEAD_DIM)[None, :]", ""),
    ],
)
def test_mutants_of_blocks_are_caught(old: str, new: str, tmp_path: Path) -> None:
    blocks = mutant(triton_blocks, tmp_path, old, new)
    whole = "from __future__ import annotations"  # nothing of the module itself changes
    made = mutant(
        triton_attention_scores,
        tmp_path,
        whole,
        whole,
        score_block=blocks.score_block,
        load_rows=blocks.load_rows,
    )
    assert_caught(made, check, CASES)
