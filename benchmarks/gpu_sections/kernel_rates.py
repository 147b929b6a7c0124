"""How near does each Triton kernel come to what the device can do, and its plain twin beside it?

Shares of the ceilings are formed where the ceilings are known, in `gpu.py`. Without a GPU this runs
in Triton's interpreter (TRITON_INTERPRET=1), where times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch

from benchmarks.gpu_sections.timing import median_s
from benchmarks.shared import harness, results
from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.filtering.snapkv import SnapKV
from gemserve_kernels import Backend, KVTable, Partial
from gemserve_kernels.attention_backends import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kernel's work, for either backend.

    `num_bytes` are the bytes that its way of working reads and writes, `flops` those of its
    products.
    """

    run: Callable[[Backend], object]
    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """What the loads are made of."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    sequences: list[int]
    sequence_tokens: int
    queries: int
    keep: int

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    @property
    def token_bytes(self) -> int:
        """One layer's keys, or values, of one token."""
        return self.kv_heads * self.dim * self.dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.add_shape_option(parser)
    parser.add_argument("--tokens", type=int, default=32768, help="keys (default: %(default)s)")
    parser.add_argument("--sequences", default="1,8,32", help="that decode; default: %(default)s")
    parser.add_argument("--sequence-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--queries", type=int, default=4096, help="of a chunk (%(default)s)")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    results.add_row_options(parser)
    arguments = parser.parse_args()
    config, device = harness.SHAPES[arguments.shape].config, arguments.device
    sizes = Sizes(
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        dim=config["head_dim"],
        tokens=arguments.tokens,
        sequences=results.numbers(arguments.sequences),
        sequence_tokens=arguments.sequence_tokens,
        queries=arguments.queries,
        keep=arguments.keep,
    )
    rows = results.Rows(arguments)
    for labels, make in loads(sizes):
        rows.attempt(labels, lambda make=make: measure(make(), device, arguments.repeats))
        results.free(device)
    results.finish("kernel_rates", device, rows, arguments.json)


def measure(load: Load, device: str, repeats: int) -> dict[str, Any]:
    from gemserve_kernels.triton_backend import TritonBackend

    ours, plain = TritonBackend(Reference()), Backend(Reference())
    started_s = time.perf_counter()
    load.run(ours)
    results.synchronize(device)
    first_s = time.perf_counter() - started_s  # this call compiles the kernel
    taken_s = median_s(lambda: load.run(ours), device, repeats=repeats)
    return {
        "time_s": taken_s,
        "plain_time_s": median_s(lambda: load.run(plain), device, repeats=3, warm_up=1),
        "first_call_s": first_s,
        "bytes_per_s": load.num_bytes / taken_s,
        "flops_per_s": load.flops / taken_s,
    }


def loads(sizes: Sizes) -> Iterator[tuple[dict[str, Any], Callable[[], Load]]]:
    """Labels of each kernel's work, and what makes it."""
    tokens = {"keys": sizes.tokens}
    yield {"kernel": "largest_attention", **tokens}, lambda: largest_attention(sizes)
    yield {"kernel": "grouped_probabilities", **tokens}, lambda: grouped_probabilities(sizes)
    yield {"kernel": "pooled", **tokens}, lambda: pooled(sizes)
    lengths = [(1, sizes.tokens), *((n, sizes.sequence_tokens) for n in sizes.sequences)]
    for count, length in lengths:
        labels = {"kernel": "decode_attention", "sequences": count, "keys": length}
        yield labels, lambda count=count, length=length: decode_attention(sizes, count, length)
    most = sizes.sequences[-1]
    yield {"kernel": "write_tokens", "sequences": most}, lambda: write_tokens(sizes, most)
    yield {"kernel": "gather_tokens", **tokens}, lambda: gather_tokens(sizes)
    yield {"kernel": "merge_ntk", "queries": sizes.queries}, lambda: merge_ntk(sizes)


def largest_attention(sizes: Sizes) -> Load:
    """With the rows of the longest question. The kernel reads the keys twice."""
    count = min(MAX_QUESTION_TOKENS, sizes.tokens)
    query = sizes.randn(sizes.heads, count, sizes.dim)
    key = sizes.randn(sizes.kv_heads, sizes.tokens, sizes.dim)
    rows = torch.arange(sizes.tokens - count, sizes.tokens, device=sizes.device)
    return Load(
        run=lambda backend: backend.largest_attention(
            query, key, rows, scale=sizes.dim**-0.5, softcap=None
        ),
        num_bytes=2.0 * sizes.tokens * sizes.token_bytes + 4.0 * sizes.tokens,
        flops=2 * 2.0 * sizes.heads * count * sizes.tokens * sizes.dim,
    )


def grouped_probabilities(sizes: Sizes) -> Load:
    count = SnapKV().observed
    query = sizes.randn(sizes.heads, count, sizes.dim)
    key = sizes.randn(sizes.kv_heads, sizes.tokens, sizes.dim)
    return Load(
        run=lambda backend: backend.grouped_probabilities(
            query, key, scale=sizes.dim**-0.5, softcap=None
        ),
        num_bytes=2.0 * sizes.tokens * sizes.token_bytes + 4.0 * sizes.tokens * sizes.kv_heads,
        flops=2 * 2.0 * sizes.heads * count * sizes.tokens * sizes.dim,
    )


def pooled(sizes: Sizes) -> Load:
    scores = sizes.randn(sizes.kv_heads, sizes.tokens, dtype=torch.float32)
    return Load(
        run=lambda backend: backend.pooled(scores, kind="mean"), num_bytes=2.0 * scores.nbytes
    )


def kv_table(sizes: Sizes, count: int, length: int) -> KVTable:
    """One layer's keys and values of sequences, one sequence after the other."""
    side = sizes.kv_heads * length
    table = [[index * 2 * side, length, side, 2 * side, length] for index in range(count)]
    return KVTable(
        rows=sizes.randn(count * 2 * side, sizes.dim),
        table=torch.tensor(table, device=sizes.device),
        kv_heads=sizes.kv_heads,
        longest=length,
    )


def decode_attention(sizes: Sizes, count: int, length: int) -> Load:
    kv, query = kv_table(sizes, count, length), sizes.randn(count, sizes.heads, sizes.dim)
    return Load(
        run=lambda backend: backend.decode(query, kv, layer=0, scale=sizes.dim**-0.5),
        num_bytes=2.0 * count * length * sizes.token_bytes,
        flops=4.0 * count * length * sizes.heads * sizes.dim,
    )


def write_tokens(sizes: Sizes, count: int) -> Load:
    kv = kv_table(sizes, count, sizes.sequence_tokens)
    key, value = (sizes.randn(sizes.kv_heads, count, sizes.dim) for _ in range(2))
    return Load(
        run=lambda backend: backend.write(kv, key, value, layer=0),
        num_bytes=2.0 * 2 * count * sizes.token_bytes,
    )


def gather_tokens(sizes: Sizes) -> Load:
    """What SnapKV keeps of four layers: each layer and key head keeps tokens of its own."""
    layers, keep = 4, min(sizes.keep, sizes.tokens)
    source = sizes.randn(layers, 2, sizes.kv_heads, sizes.tokens, sizes.dim)
    target = torch.empty_like(source[:, :, :, :keep])
    shuffled = torch.rand(layers, sizes.kv_heads, sizes.tokens, device=sizes.device).argsort(-1)
    chosen = shuffled[..., :keep].sort(-1).values
    return Load(
        run=lambda backend: backend.gather(source, target, chosen),
        num_bytes=2.0 * 2 * layers * keep * sizes.token_bytes,
    )


def merge_ntk(sizes: Sizes) -> Load:
    """On a chunk, with r = d and s = 16, the default."""
    heads, queries, dim, inner = sizes.heads, sizes.queries, sizes.dim, 16
    query, out = (sizes.randn(heads, queries, dim) for _ in range(2))
    part = Partial(out, sizes.randn(heads, queries, dtype=torch.float32))
    shapes = ((heads, dim, inner), (heads, inner, dim), (heads, dim))
    z_a, z_b, k = (sizes.randn(*shape, dtype=torch.float32) for shape in shapes)
    k.abs_()
    return Load(
        run=lambda backend: backend.merge_ntk([part], query, z_a, z_b, k),
        num_bytes=heads * queries * (3.0 * dim * sizes.dtype.itemsize + 4),
        flops=2.0 * heads * queries * (2 * dim * inner + dim),
    )


if __name__ == "__main__":
    main()
