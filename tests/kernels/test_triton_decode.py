"""Triton's decode attention against its reference, over ragged spans of one memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from gemserve_kernels import KVTable, decode_attention
from tests.kernels.twins import (
    CLOSE,
    DEVICE,
    amid,
    assert_caught,
    guarded,
    mutant,
    random,
    twin,
    wide,
)

triton_decode, triton_blocks = twin("triton_decode"), twin("triton_blocks")


@dataclass(frozen=True, kw_only=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    layer: int = 1
    softcap: float | None = None
    window: int | None = None
    scale: float = 0.3
    dtype: torch.dtype = torch.float32
    programs: int = 1024  # as many as make every block a piece of its own
    first_row: int = 3  # of the first sequence
    close: float = CLOSE


CASES = [
    # first those that catch the most mutants
    Case(heads=6, kv_heads=2, head_dim=80, lengths=(70, 0, 1, 33)),
    Case(heads=4, kv_heads=1, head_dim=32, lengths=(190, 0), programs=1, softcap=5.0),
    # scores near ±150, whose exponentials overflow
    Case(heads=4, kv_heads=4, head_dim=32, lengths=(131,), scale=8.0, close=30 * CLOSE),
    Case(heads=8, kv_heads=2, head_dim=128, lengths=(150, 40), window=70, dtype=torch.bfloat16),
    # more than 16 pieces, which are joined 16 at a time; scores near ±400
    Case(heads=8, kv_heads=1, head_dim=256, lengths=(281, 16), scale=8.0, close=100 * CLOSE),
    Case(heads=1, kv_heads=1, head_dim=64, lengths=(1,), dtype=torch.float16, layer=0),
    Case(heads=17, kv_heads=1, head_dim=96, lengths=(33, 0), window=1, programs=1),
    Case(heads=4, kv_heads=2, head_dim=32, lengths=(0, 0)),
    Case(heads=4, kv_heads=2, head_dim=32, lengths=()),
]


def spans_of(case: Case) -> KVTable:
    """Sequences in a shuffled order, with room beyond their ends, in memory that is else NaN."""
    layers, start, places = 2, case.first_row, {}
    for index in sorted(range(len(case.lengths)), key=lambda i: -i % 3):
        capacity = case.lengths[index] + 2 * index
        places[index] = (start, capacity)
        start += layers * 2 * case.kv_heads * capacity + 1
    memory = amid((start, case.head_dim), torch.nan, case.dtype)[0]
    table: list[tuple[int, ...]] = []
    for index, length in enumerate(case.lengths):
        first, capacity = places[index]
        count = layers * 2 * case.kv_heads * capacity
        own = memory[first : first + count].view(
            layers * 2 * case.kv_heads, capacity, case.head_dim
        )
        own[:, :length] = random(own.shape[0], length, case.head_dim, seed=index)
        table.append(
            (first, capacity, case.kv_heads * capacity, 2 * case.kv_heads * capacity, length)
        )
    return KVTable(
        rows=memory,
        table=torch.tensor(table, device=DEVICE).view(-1, 5).long(),
        kv_heads=case.kv_heads,
        longest=max(case.lengths, default=0),
    )


def check(module: ModuleType, case: Case) -> None:
    spans = spans_of(case)
    query = wide(random(len(case.lengths), case.heads, case.head_dim, dtype=case.dtype), 1)
    options = {
        "layer": case.layer,
        "scale": case.scale,
        "softcap": case.softcap,
        "window": case.window,
    }
    with guarded(), mock.patch.object(module, "_PROGRAMS", case.programs):
        ours = module.decode_attention(query, spans, **options)
    theirs = decode_attention(query, spans, **options)
    assert ours.out.dtype == case.dtype
    assert ours.out.stride() == theirs.out.stride()
    close = case.close if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.lse, theirs.lse, atol=10 * case.close, rtol=CLOSE)
    torch.testing.assert_close(ours.out, theirs.out, atol=close, rtol=close)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case) -> None:
    check(triton_decode, case)


def test_empty_sequence_contributes_nothing() -> None:
    case = Case(heads=4, kv_heads=2, head_dim=32, lengths=(0, 5))
    part = triton_decode.decode_attention(random(2, 4, 32), spans_of(case), layer=0, scale=1.0)
    assert part.out[:, 0].tolist() == [[0.0] * 32] * 4
    assert part.lse[:, 0].tolist() == [-torch.inf] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("programs", [1, 1024])
def test_nan_is_not_hidden(programs: int) -> None:
    """Of a broken key an empty sequence would make an answer that looks like one."""
    spans = spans_of(Case(heads=4, kv_heads=2, head_dim=32, lengths=(130,)))
    spans.rows[3:, 5] = torch.nan
    with mock.patch.object(triton_decode, "_PROGRAMS", programs):
        part = triton_decode.decode_attention(random(1, 4, 32), spans, layer=0, scale=1.0)
    assert bool(part.out.isnan().all())
    assert bool(part.lse.isnan().all())


@pytest.mark.parametrize(
    ("programs", "visible", "block", "size", "pieces"),
    [
        (8, 131_072, 64, 2_048, 64),  # one long sequence, 8 key heads: 512 programs
        (8, 1_024, 64, 64, 16),  # a short one: a block is the least
        (256, 1_025, 64, 576, 2),
        (1_000, 131_072, 64, 131_072, 1),
        (8, 0, 64, 64, 0),
        (0, 10, 64, 64, 1),
    ],
)
def test_pieces_keep_a_large_gpu_busy(
    programs: int, visible: int, block: int, size: int, pieces: int
) -> None:
    assert triton_decode._split_size(programs, visible, block) == size
    assert -(-visible // size) == pieces


MUTATIONS: list[tuple[str, str, int | None]] = [
    ("score_block(q, k, scale,", "score_block(q, k, scale * 1.01,", None),
    ("is_token = tokens < stop", "is_token = tokens <= stop", None),
    ("length - visible, 0", "length - visible - 1, 0", None),
    ("+ part * split", "+ 0 * part * split", None),
    # where things lie
    ("layer * tl.load(place + 3)", "0", None),
    ("kv_head * tl.load(place + 1)", "kv_head", None),
    ("rows + to_value", "rows", None),
    ("table + sequence * 5\n", "table\n", None),
    # heads
    ("kv_head * group + members", "members * 2 + kv_head", None),
    ("is_member = members < group", "is_member = members < ROWS", None),
    # the softmax
    ("higher = tl.maximum(largest, tl.max(scores, 1))", "higher = tl.max(scores, 1) * 0", None),
    ("total * shrink", "total", None),
    ("summed * shrink[:, None]", "summed", None),
    ("summed / total[:, None]", "summed", None),
    ('tl.where(is_token[None, :], scores, float("-inf"))', "scores", None),
    # empty sequences and pieces
    ("(part > 0) & (start >= length)", "start >= length", None),
    ('tl.where(is_empty, float("-inf"), largest + tl.log(total))', "tl.log(total)", None),
    ("largest + tl.log(total)", "tl.log(total)", None),
    ("total = tl.where(is_empty, 1.0, total)", "total = total", None),
    # the join
    ("splits = max(1, triton.cdiv(visible, split))", "splits = max(1, visible // split)", None),
    ("tl.cdiv(tl.minimum(length, visible), split)", "tl.cdiv(visible, split)", None),
    ("tl.cdiv(tl.minimum(length, visible), split)", "tl.minimum(length, visible) // split", None),
    ("tl.minimum(length, visible)", "length", None),
    ("largest = tl.maximum(largest, found)", "largest = found", None),
    ("tl.exp(found - shift)", "tl.where(is_part, 1.0, 0.0)", None),
    ("tl.exp(found - shift)", "tl.exp(found)", None),
    ("summed / weight", "summed", None),
    ("shift + tl.log(weight)", "tl.log(weight)", None),
    ("total += weights", "total = weights", None),
    ("summed += tl.sum(weights", "summed = tl.sum(weights", None),
    ("weight = tl.where(is_empty, 1.0, weight)", "weight = weight", None),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("old", "new", "nth"), MUTATIONS)
def test_mutants_are_caught(old: str, new: str, nth: int | None, tmp_path: Path) -> None:
    assert_caught(mutant(triton_decode, tmp_path, old, new, nth=nth), check, CASES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_beyond_the_end_are_not_read(tmp_path: Path) -> None:
    """What lies behind a sequence is another's, or was never written."""
    blocks = mutant(triton_blocks, tmp_path, "is_row[:, None] & ", "")
    whole = "from __future__ import annotations"  # nothing of the module itself changes
    made = mutant(triton_decode, tmp_path, whole, whole, load_rows=blocks.load_rows)
    assert_caught(made, check, CASES)
