"""Triton's copies of keys and values against their references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemserve_kernels import KVTable, gather_tokens, write_tokens
from tests.kernels.twins import DEVICE, amid, assert_caught, mutant, random, twin, wide

triton_kv_copy = twin("triton_kv_copy")


@dataclass(frozen=True, kw_only=True)
class Gather:
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    kept: int
    dtype: torch.dtype = torch.float32
    is_shared: bool = False  # one choice for every layer and head


GATHERS = [
    Gather(layers=2, kv_heads=3, head_dim=80, tokens=50, kept=37),
    Gather(layers=3, kv_heads=1, head_dim=32, tokens=9, kept=1, dtype=torch.bfloat16),
    Gather(layers=1, kv_heads=2, head_dim=256, tokens=70, kept=70, is_shared=True),
    Gather(layers=2, kv_heads=2, head_dim=96, tokens=5, kept=0),
]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bit by bit, NaN where there is NaN: everything else of the memory is as it was."""
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


def check_gather(module: ModuleType, case: Gather) -> None:
    """The source has run one layer more than is kept."""
    shape = (case.layers + 1, 2, case.kv_heads, case.tokens, case.head_dim)
    source = random(*shape, dtype=case.dtype)
    generator = torch.Generator().manual_seed(case.kept)
    heads = (1, 1) if case.is_shared else (case.layers, case.kv_heads)
    order = torch.rand(*heads, case.tokens, generator=generator).argsort(-1)[..., : case.kept]
    # every other number of memory that is else 0
    lain = amid((*order.shape, 2), 0, torch.long)[0][..., 0]
    chosen = lain.copy_(order.sort(-1).values).expand(case.layers, case.kv_heads, -1)
    results = []
    for gather in (module.gather_tokens, gather_tokens):
        target_shape = (case.layers, 2, case.kv_heads, case.kept + 3, case.head_dim)
        target, around = amid(target_shape, torch.nan, case.dtype)
        gather(source, target, chosen)
        results.append(around)
    same(*results)


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gather_equals_reference(case: Gather) -> None:
    check_gather(triton_kv_copy, case)


def test_gather_refuses_overlap() -> None:
    """Programs run in any order: one would overwrite what another has still to read."""
    memory = random(400)
    source, target = memory[:240].view(1, 2, 1, 5, 24), memory[239:335].view(1, 2, 1, 2, 24)
    chosen = torch.zeros(1, 1, 2, dtype=torch.long)
    with pytest.raises(AssertionError):
        triton_kv_copy.gather_tokens(source, target, chosen)


@pytest.mark.parametrize(
    ("old", "new", "nth"),
    [
        ("tl.program_id(2) // 2, tl.program_id(2) % 2", "tl.program_id(2) // 2, 0", None),
        ("tl.program_id(2) // 2, tl.program_id(2) % 2", "0, tl.program_id(2) % 2", None),
        ("is_slot = slots < kept", "is_slot = slots <= kept", None),
        ("layer * chosen_layer", "0", None),
        ("head * chosen_head", "0", None),
        ("slots * chosen_token", "slots", None),
        ("positions[:, None] * source_token", "slots[:, None] * source_token", None),
        ("slots[:, None] * target_token", "(slots[:, None] + 1) * target_token", None),
        ("layer * source_layer", "0", None),
        ("layer * target_layer", "0", None),
        ("head * source_head", "0", None),
        ("side * target_side", "0", None),
        ("(dims < HEAD_DIM)[None, :]", "(dims < DIM_BLOCK)[None, :]", 0),
        ("(dims < HEAD_DIM)[None, :]", "(dims < HEAD_DIM - 1)[None, :]", 0),
        ("triton.cdiv(kept, _TOKENS)", "max(1, kept // _TOKENS)", None),
    ],
)
def test_mutants_of_gather_are_caught(old: str, new: str, nth: int | None, tmp_path: Path) -> None:
    assert_caught(mutant(triton_kv_copy, tmp_path, old, new, nth=nth), check_gather, GATHERS)


@dataclass(frozen=True, kw_only=True)
class Write:
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    layer: int = 1
    dtype: torch.dtype = torch.float32
    first_row: int = 5  # of the first sequence


WRITES = [
    Write(kv_heads=3, head_dim=80, lengths=(4, 0, 1, 7)),
    Write(kv_heads=1, head_dim=32, lengths=(1,), layer=0, dtype=torch.bfloat16),
    Write(kv_heads=8, head_dim=256, lengths=(0, 3)),
    Write(kv_heads=2, head_dim=32, lengths=()),
]


def check_write(module: ModuleType, case: Write) -> None:
    """Each sequence has room for two more tokens than it counts, in two layers."""
    table, start = [], case.first_row
    for length in case.lengths:
        capacity = length + 2
        steps = (capacity, case.kv_heads * capacity, 2 * case.kv_heads * capacity)
        table.append((start, *steps, length))
        start += 2 * steps[-1]
    shape = (len(case.lengths), case.kv_heads, case.head_dim)
    # as a model's projections hand them over: heads within tokens
    key = wide(random(*shape, dtype=case.dtype), 1).transpose(0, 1)
    value = wide(random(*shape, seed=1, dtype=case.dtype), 0).transpose(0, 1)
    results = []
    for write in (module.write_tokens, write_tokens):
        rows, around = amid((start, case.head_dim), torch.nan, case.dtype)
        spans = KVTable(
            rows=rows,
            table=torch.tensor(table).view(-1, 5).long().to(DEVICE),
            kv_heads=case.kv_heads,
            longest=max(case.lengths, default=0),
        )
        write(spans, key, value, layer=case.layer)
        results.append(around)
    same(*results)


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write_equals_reference(case: Write) -> None:
    check_write(triton_kv_copy, case)


@pytest.mark.parametrize(
    ("old", "new", "nth"),
    [
        ("+ length - 1", "+ length", None),
        ("if length == 0", "if length < 0", None),
        ("layer * tl.load(place + 3)", "0", None),
        ("heads * tl.load(place + 1)", "heads", None),
        ("rows + tl.load(place + 2)", "rows + 1", None),
        ("sequence * key_sequence", "0", None),
        ("sequence * value_sequence", "sequence * key_sequence", None),
        ("heads[:, None] * key_head", "heads[:, None] * value_head * 2", None),
        ("dims[None, :], k, mask=mask", "dims[None, :], v, mask=mask", None),
        ("(heads < kv_heads)[:, None]", "(heads <= kv_heads)[:, None]", None),
        ("(dims < HEAD_DIM)[None, :]", "(dims < HEAD_DIM - 1)[None, :]", 1),
        ("table + sequence * 5", "table", None),
    ],
)
def test_mutants_of_write_are_caught(old: str, new: str, nth: int | None, tmp_path: Path) -> None:
    assert_caught(mutant(triton_kv_copy, tmp_path, old, new, nth=nth), check_write, WRITES)
