"""How near each kernel comes to what the device can do, and how its plain twin does beside it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gemserve.types import MAX_QUESTION_TOKENS, SNAPKV_ROWS
from gemserve_kernels import Partial
from gpu_sections.bench import Bench, share
from gpu_sections.kernel_cases import random_spans
from gpu_sections.record import Figures, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kernel's work: `run` evaluates one of the two modules of `gemserve_kernels`.

    `num_bytes`: read and written at least, by how the kernel works; `flops`: of its products.
    """

    twin: str
    plain: str
    run: Callable[[Any], object]
    num_bytes: float
    flops: float = 0.0


def run(bench: Bench, record: Record) -> None:
    for labels, make in _loads(bench):
        record.attempt(labels, partial(_measure, bench, record, make))
        bench.machine.free()


def _measure(bench: Bench, record: Record, make: Callable[[], Load]) -> Figures:
    load, machine, repeats = make(), bench.machine, bench.scale.repeats
    twin = importlib.import_module(f"gemserve_kernels.{load.twin}")
    plain = importlib.import_module(f"gemserve_kernels.{load.plain}")
    started_s = time.perf_counter()
    load.run(twin)
    machine.synchronize()
    first_s = time.perf_counter() - started_s  # compiled in this call
    taken_s = machine.seconds(lambda: load.run(twin), repeats=repeats)
    record.check_time()
    plain_s = machine.seconds(lambda: load.run(plain), repeats=3, warm_up=1)
    bandwidth, flops = load.num_bytes / taken_s, load.flops / taken_s
    return {
        "time": (taken_s, "s"),
        "plain_time": (plain_s, "s"),
        "first_call": (first_s, "s"),
        "bandwidth": (bandwidth, "bytes/s"),
        "share_of_copy": (share(bandwidth, bench.ceiling("copy")), "1"),
        "flops": (flops, "FLOP/s"),
        "share_of_bf16": (share(flops, bench.ceiling("bf16")), "1"),
    }


def _loads(bench: Bench) -> list[tuple[Mapping[str, Any], Callable[[], Load]]]:
    tokens, scale = bench.scale.kernel_tokens, bench.scale
    listed: list[tuple[Mapping[str, Any], Callable[[], Load]]] = [
        ({"kernel": "largest_attention", "keys": tokens}, partial(_largest, bench)),
        ({"kernel": "grouped_probabilities", "keys": tokens}, partial(_grouped, bench)),
        ({"kernel": "pooled", "keys": tokens}, partial(_pooled, bench)),
    ]
    for sequences, length in ((1, tokens), *((n, scale.sequence_tokens) for n in scale.sequences)):
        labels = {"kernel": "decode_attention", "sequences": sequences, "keys": length}
        listed.append((labels, partial(_decode, bench, sequences, length)))
    return [
        *listed,
        ({"kernel": "write_tokens", "sequences": scale.sequences[-1]}, partial(_write, bench)),
        ({"kernel": "gather_tokens", "keys": tokens}, partial(_gather, bench)),
        ({"kernel": "merge_ntk", "queries": scale.warm_up_tokens}, partial(_ntk, bench)),
    ]


def _sizes(bench: Bench) -> tuple[int, int, int, int]:
    """Query heads, key heads, numbers of one head, bytes of a number."""
    model = bench.scale.model
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    return heads, kv_heads, model["head_dim"], bench.machine.dtype.itemsize


def _observed(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    heads, kv_heads, dim, _ = _sizes(bench)
    query = bench.machine.randn(heads, rows, dim)
    key = bench.machine.randn(kv_heads, bench.scale.kernel_tokens, dim)
    return query, key, {"scale": dim**-0.5}


def _largest(bench: Bench) -> Load:
    """The keys are read twice: for the log-sum-exps, and for the probabilities.

    The rows are those of the longest question.
    """
    heads, kv_heads, dim, size = _sizes(bench)
    tokens, count = bench.scale.kernel_tokens, min(MAX_QUESTION_TOKENS, bench.scale.kernel_tokens)
    query, key, options = _observed(bench, count)
    rows = torch.arange(tokens - count, tokens, device=key.device)
    return Load(
        twin="triton_attention_scores",
        plain="attention_scores",
        run=lambda operations: operations.largest_attention(query, key, rows, **options),
        num_bytes=2.0 * kv_heads * tokens * dim * size + 4.0 * tokens,
        flops=2 * 2.0 * heads * count * tokens * dim,
    )


def _grouped(bench: Bench) -> Load:
    heads, kv_heads, dim, size = _sizes(bench)
    tokens = bench.scale.kernel_tokens
    query, key, options = _observed(bench, SNAPKV_ROWS)
    return Load(
        twin="triton_attention_scores",
        plain="attention_scores",
        run=lambda operations: operations.grouped_probabilities(query, key, **options),
        num_bytes=2.0 * kv_heads * tokens * dim * size + 4.0 * tokens * kv_heads,
        flops=2 * 2.0 * heads * SNAPKV_ROWS * tokens * dim,
    )


def _pooled(bench: Bench) -> Load:
    _, kv_heads, _, _ = _sizes(bench)
    scores = bench.machine.randn(kv_heads, bench.scale.kernel_tokens, dtype=torch.float32)
    return Load(
        twin="triton_pooling",
        plain="attention_scores",
        run=lambda operations: operations.pooled(scores, kind="mean"),
        num_bytes=2.0 * scores.nbytes,
    )


def _decode(bench: Bench, sequences: int, length: int) -> Load:
    heads, kv_heads, dim, size = _sizes(bench)
    spans = random_spans(
        bench.machine, (length,) * sequences, kv_heads, dim, bench.machine.dtype, layers=1
    )
    query = bench.machine.randn(sequences, heads, dim)
    options = {"layer": 0, "scale": dim**-0.5}
    return Load(
        twin="triton_decode",
        plain="decode",
        run=lambda operations: operations.decode_attention(query, spans, **options),
        num_bytes=2.0 * sequences * length * kv_heads * dim * size,
        flops=4.0 * sequences * length * heads * dim,
    )


def _write(bench: Bench) -> Load:
    _, kv_heads, dim, size = _sizes(bench)
    count, length = bench.scale.sequences[-1], bench.scale.sequence_tokens
    spans = random_spans(
        bench.machine, (length,) * count, kv_heads, dim, bench.machine.dtype, layers=1
    )
    key, value = (bench.machine.randn(kv_heads, count, dim) for _ in range(2))
    return Load(
        twin="triton_kv_copy",
        plain="kv_copy",
        run=lambda operations: operations.write_tokens(spans, key, value, layer=0),
        num_bytes=2.0 * 2 * kv_heads * count * dim * size,
    )


def _gather(bench: Bench) -> Load:
    """What SnapKV keeps of four layers."""
    _, kv_heads, dim, size = _sizes(bench)
    layers, keep, tokens = 4, bench.scale.keep, bench.scale.kernel_tokens
    source = bench.machine.randn(layers, 2, kv_heads, tokens, dim)
    target = torch.empty_like(source[:, :, :, :keep])
    order = torch.rand(layers, kv_heads, tokens, device=bench.machine.device).argsort(-1)
    chosen = order[..., :keep].sort(-1).values
    return Load(
        twin="triton_kv_copy",
        plain="kv_copy",
        run=lambda operations: operations.gather_tokens(source, target, chosen),
        num_bytes=2.0 * 2 * layers * kv_heads * keep * dim * size,
    )


def _ntk(bench: Bench) -> Load:
    """r = d and s = 16, the default, on a chunk."""
    heads, _, dim, size = _sizes(bench)
    queries, inner, machine = bench.scale.warm_up_tokens, 16, bench.machine
    query, out = (machine.randn(heads, queries, dim) for _ in range(2))
    part = Partial(out, machine.randn(heads, queries, dtype=torch.float32))
    shapes = ((heads, dim, inner), (heads, inner, dim), (heads, dim))
    z_a, z_b, k = (machine.randn(*shape, dtype=torch.float32) for shape in shapes)
    k.abs_()
    return Load(
        twin="triton_ntk",
        plain="ntk",
        run=lambda operations: operations.merge_ntk(part, query, z_a, z_b, k),
        num_bytes=heads * queries * (3.0 * dim * size + 4),
        flops=2.0 * heads * queries * (2 * dim * inner + dim),
    )
