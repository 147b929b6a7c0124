"""Inputs of the Triton kernels and of their plain twins, and how far apart the two may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gemserve_kernels import KVTable, Partial
from gpu_sections.machine import Machine

Outputs = Mapping[str, torch.Tensor]
SINGLE, BFLOAT, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# Blocks become float32, of whose products three in tf32 stand for one; those of halves are exact.
FLOAT_BOUND = 3e-5
HALF_BOUND = 2e-2  # of what is rounded to a half in the end
_GUARD = 4096  # elements of NaN on either side


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`run` evaluates one of the two modules of `gemserve_kernels`; `bounds`: by output."""

    twin: str
    plain: str
    run: Callable[[Any], Outputs]
    bounds: Mapping[str, float]


Make = Callable[..., Case]


def amid(machine: Machine, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, and so is the memory on either side."""
    count = math.prod(shape)
    whole = torch.full((count + 2 * _GUARD,), math.nan, dtype=dtype, device=machine.device)
    return whole[_GUARD : _GUARD + count].view(shape)


def random(machine: Machine, *shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    """Standard normal, amid NaN."""
    return amid(machine, shape, dtype).normal_()


def random_spans(
    machine: Machine,
    lengths: tuple[int, ...],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    layers: int = 2,
    skipped_rows: int = 0,
) -> KVTable:
    """One after the other in a memory that is else NaN, each with a little room beyond its end."""
    room = 3
    sides = layers * 2 * kv_heads
    rows = skipped_rows + sum(sides * (length + room) for length in lengths)
    memory = amid(machine, (rows, head_dim), dtype)
    table: list[list[int]] = []
    first = skipped_rows
    for length in lengths:
        capacity = length + room
        own = memory[first : first + sides * capacity].view(sides, capacity, head_dim)
        own[:, :length].normal_()
        table.append([first, capacity, kv_heads * capacity, 2 * kv_heads * capacity, length])
        first += sides * capacity
    return KVTable(
        rows=memory,
        table=torch.tensor(table, dtype=torch.long, device=machine.device).view(-1, 5),
        kv_heads=kv_heads,
        longest=max(lengths, default=0),
    )


def window_scores(
    machine: Machine,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    keys: int,
    dtype: torch.dtype,
    softcap: float | None = None,
) -> Case:
    """What rows attend to: the last ones, as SnapKV sums it, and rows apart, as sieve does."""
    query = random(machine, heads, window, head_dim, dtype=dtype)
    key = random(machine, kv_heads, keys, head_dim, dtype=dtype)
    options = {"scale": head_dim**-0.5, "softcap": softcap}
    last = torch.arange(keys - window, keys, device=machine.device)
    apart = torch.linspace(0, keys - 1, window, device=machine.device).long()

    def run(operations: Any) -> Outputs:
        return {
            "largest": operations.largest_attention(query, key, last, **options),
            "largest_apart": operations.largest_attention(query, key, apart, **options),
            "grouped": operations.grouped_probabilities(query, key, **options),
        }

    bounds = dict.fromkeys(("largest", "largest_apart", "grouped"), FLOAT_BOUND)
    return Case(twin="triton_attention_scores", plain="attention_scores", run=run, bounds=bounds)


def pooled(
    machine: Machine, *, rows: int, keys: int, kind: str, width: int, dtype: torch.dtype
) -> Case:
    # below zero, so that a zero from outside would win a maximum
    scores = random(machine, rows, keys, dtype=dtype).abs_().neg_()

    def run(operations: Any) -> Outputs:
        return {"pooled": operations.pooled(scores, kind=kind, width=width)}

    return Case(twin="triton_pooling", plain="attention_scores", run=run, bounds={"pooled": 1e-6})


def decode_attention(
    machine: Machine,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    softcap: float | None = None,
    window: int | None = None,
    skipped_rows: int = 0,
) -> Case:
    spans = random_spans(machine, lengths, kv_heads, head_dim, dtype, skipped_rows=skipped_rows)
    query = random(machine, len(lengths), heads, head_dim, dtype=dtype)
    options = {"layer": 1, "scale": head_dim**-0.5, "softcap": softcap, "window": window}

    def run(operations: Any) -> Outputs:
        part = operations.decode_attention(query, spans, **options)
        return {"out": part.out, "lse": part.lse}

    out_bound = FLOAT_BOUND if dtype == SINGLE else HALF_BOUND
    bounds = {"out": out_bound, "lse": 10 * FLOAT_BOUND}
    return Case(twin="triton_decode", plain="decode", run=run, bounds=bounds)


def write_tokens(
    machine: Machine,
    *,
    kv_heads: int,
    head_dim: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    skipped_rows: int = 0,
) -> Case:
    spans = random_spans(machine, lengths, kv_heads, head_dim, dtype, skipped_rows=skipped_rows)
    shape = (kv_heads, len(lengths), head_dim)
    key, value = (random(machine, *shape, dtype=dtype) for _ in range(2))

    def run(operations: Any) -> Outputs:
        own = replace(spans, rows=spans.rows.clone())
        operations.write_tokens(own, key, value, layer=1)
        return {"memory": own.rows[skipped_rows:]}

    return Case(twin="triton_kv_copy", plain="kv_copy", run=run, bounds={"memory": 0.0})


def gather_tokens(
    machine: Machine,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    kept: int,
    dtype: torch.dtype,
) -> Case:
    """Each layer and key head keeps tokens of its own."""
    source = random(machine, layers, 2, kv_heads, tokens, head_dim, dtype=dtype)
    order = torch.rand(layers, kv_heads, tokens, device=machine.device).argsort(-1)
    chosen = order[..., :kept].sort(-1).values

    def run(operations: Any) -> Outputs:
        target = amid(machine, (layers, 2, kv_heads, kept + 2, head_dim), dtype)
        operations.gather_tokens(source, target, chosen)
        return {"target": target}

    return Case(twin="triton_kv_copy", plain="kv_copy", run=run, bounds={"target": 0.0})


def merge_ntk(
    machine: Machine,
    *,
    heads: int,
    head_dim: int,
    features: int,
    inner: int,
    queries: int,
    dtype: torch.dtype,
    shift: float = 0.0,
    is_positive: bool = True,
) -> Case:
    """`shift`: of the part's log-sum-exps; `is_positive`: of k, whose bound else decides."""
    query = random(machine, heads, queries, head_dim, dtype=dtype)
    part = Partial(
        random(machine, heads, queries, head_dim, dtype=dtype),
        random(machine, heads, queries) + shift,
    )
    z_a = random(machine, heads, features, inner)
    z_b = random(machine, heads, inner, head_dim)
    k = random(machine, heads, features).abs_()
    term = (z_a, z_b, k if is_positive else -k)

    def run(operations: Any) -> Outputs:
        return {"out": operations.merge_ntk(part, query, *term)}

    # what the bound leaves of a denominator is a thousandth of its terms
    float_bound = 3 * FLOAT_BOUND * (1 if is_positive else 30)
    bounds = {"out": float_bound if dtype == SINGLE else HALF_BOUND}
    return Case(twin="triton_ntk", plain="ntk", run=run, bounds=bounds)


_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": BFLOAT}
_KEYS = {"kv_heads": 8, "head_dim": 128, "dtype": BFLOAT}
_LONG, _MANY = (100_003, 1_024), tuple(range(100, 356))
_NTK = {"heads": 32, "head_dim": 128, "features": 128, "inner": 16, "dtype": BFLOAT}

# Llama-3.1-8B's shapes,
LLAMA: tuple[tuple[Make, dict[str, Any]], ...] = (
    (window_scores, {**_HEADS, "window": 4, "keys": 100_003}),
    (pooled, {"rows": 8, "keys": 100_003, "kind": "mean", "width": 5, "dtype": SINGLE}),
    (decode_attention, {**_HEADS, "lengths": _LONG}),
    (write_tokens, {**_KEYS, "lengths": _LONG}),
    (gather_tokens, {**_KEYS, "layers": 2, "tokens": 100_003, "kept": 1024}),
    (merge_ntk, {**_NTK, "queries": 2048}),
    (window_scores, {**_HEADS, "window": 32, "keys": 32_768}),
    (decode_attention, {**_HEADS, "lengths": _MANY}),
    (write_tokens, {**_KEYS, "lengths": _MANY}),
)
# and small, odd ones.
SMALL: tuple[tuple[Make, dict[str, Any]], ...] = (
    (
        window_scores,
        {"heads": 6, "kv_heads": 2, "head_dim": 80, "window": 3, "keys": 67, "dtype": SINGLE},
    ),
    (pooled, {"rows": 2, "keys": 259, "kind": "max", "width": 17, "dtype": torch.float64}),
    (
        decode_attention,
        {"heads": 6, "kv_heads": 2, "head_dim": 80, "lengths": (70, 0, 1), "dtype": SINGLE},
    ),
    (write_tokens, {"kv_heads": 3, "head_dim": 80, "lengths": (4, 0, 1), "dtype": SINGLE}),
    (
        gather_tokens,
        {"layers": 2, "kv_heads": 3, "head_dim": 80, "tokens": 50, "kept": 37, "dtype": SINGLE},
    ),
    (
        merge_ntk,
        {
            **{"heads": 3, "head_dim": 80, "features": 160, "inner": 4, "queries": 35},
            **{"dtype": SINGLE, "shift": 5.0},
        },
    ),
    (
        window_scores,
        {
            **{"heads": 4, "kv_heads": 4, "head_dim": 32, "window": 5, "keys": 65},
            **{"dtype": FLOAT16, "softcap": 2.0},
        },
    ),
    (pooled, {"rows": 3, "keys": 7, "kind": "mean", "width": 5, "dtype": SINGLE}),
    (
        decode_attention,
        {
            **{"heads": 8, "kv_heads": 1, "head_dim": 256, "lengths": (90, 16)},
            **{"dtype": FLOAT16, "softcap": 5.0, "window": 70},
        },
    ),
    (
        merge_ntk,
        {
            **{"heads": 2, "head_dim": 32, "features": 32, "inner": 16, "queries": 7},
            **{"dtype": SINGLE, "shift": -300.0, "is_positive": False},
        },
    ),
)


def far(rows: int) -> tuple[tuple[Make, dict[str, Any]], ...]:
    """Llama's shapes behind that many rows, which 32 bits do not count the numbers of."""
    place = {"lengths": (1000, 33), "skipped_rows": rows}
    return (
        (decode_attention, {**_HEADS, **place}),
        (write_tokens, {**_KEYS, **place}),
        (gather_tokens, {**_KEYS, "layers": 9, "tokens": 131_072, "kept": 1024}),
    )
