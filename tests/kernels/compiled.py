"""Compiles every Triton kernel for NVIDIA GPUs, which takes none; test_triton_compiles runs this.

Triton's interpreter takes what its compiler refuses, and knows nothing of shared memory. So the
twins are called as they would be on a GPU, with a driver that names one and launches nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

import gemserve_kernels
from gemserve_kernels.cpu_step import ACTIVATIONS


@dataclass
class Driver:
    """A GPU of one compute capability."""

    capability: int = 0

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def call_all(dtype: torch.dtype, head_dim: int, window: int, softcap: float | None) -> None:
    """Every twin once, and again where it does something else for long sequences."""
    from gemserve_kernels import (
        triton_attention_scores,
        triton_decode,
        triton_kv_copy,
        triton_ntk,
        triton_parts,
        triton_pooling,
    )

    heads, kv_heads, keys, sequences = 8, 2, 77, 3
    query = torch.zeros(heads, window, head_dim, dtype=dtype)
    key = torch.zeros(kv_heads, keys, head_dim, dtype=dtype)
    triton_attention_scores.largest_attention(
        query, key, torch.arange(window), scale=0.1, softcap=softcap
    )
    triton_attention_scores.grouped_probabilities(query, key, scale=0.1, softcap=softcap)
    for kind, score_dtype in (("mean", torch.float32), ("max", torch.float64)):
        triton_pooling.pooled(torch.zeros(2, keys, dtype=score_dtype), kind=kind)
    for longest in (10, 100_000):
        spans = gemserve_kernels.KVTable(
            rows=torch.zeros(1, head_dim, dtype=dtype),
            table=torch.zeros(sequences, 5, dtype=torch.long),
            kv_heads=kv_heads,
            longest=longest,
        )
        one = torch.zeros(sequences, heads, head_dim, dtype=dtype)
        triton_decode.decode_attention(one, spans, layer=1, scale=0.1, softcap=softcap)
    new = torch.zeros(kv_heads, sequences, head_dim, dtype=dtype)
    triton_kv_copy.write_tokens(spans, new, new, layer=1)
    span = torch.zeros(2, 1, 2, kv_heads, 9, head_dim, dtype=dtype)
    triton_kv_copy.gather_tokens(span[0], span[1], torch.zeros(1, kv_heads, 5, dtype=torch.long))
    part = gemserve_kernels.Partial(query, torch.zeros(heads, window))
    term = [torch.zeros(heads, *s) for s in ((2 * head_dim, 16), (16, head_dim), (2 * head_dim,))]
    triton_ntk.merge_ntk([part], query, *term)
    if dtype == torch.float32:  # which parts of layers do not take
        dtype = torch.float16
    parts = triton_parts.TritonParts()
    states = torch.zeros(window, heads * head_dim, dtype=dtype)
    parts.norm(states, states[0], 1e-5)
    for activation in ACTIVATIONS:
        parts.gate(states, states, activation)
    angles = torch.zeros(window, head_dim, dtype=dtype)
    q, k = (torch.zeros(n, window, head_dim, dtype=dtype) for n in (heads, kv_heads))
    parts.rotate_both(q, k, angles, angles)


def main() -> None:
    """Print for each kernel: capability, dtype, head_dim, name, shared bytes, if it has tf32."""
    assert "triton" not in sys.modules, "importing gemserve_kernels must not need triton"
    import triton
    from triton.runtime.jit import JITFunction

    driver = Driver()
    triton.runtime.driver.set_active(driver)
    launch = JITFunction.run
    made: list[tuple[Any, ...]] = []

    def compile_only(self: Any, *arguments: Any, warmup: bool, **keywords: Any) -> None:
        kernel = launch(self, *arguments, warmup=True, **keywords)
        made.append((*about, self.__name__, kernel.metadata.shared, "tf32" in kernel.asm["ptx"]))

    JITFunction.run = compile_only
    cases = [
        (90, torch.bfloat16, 80, 16, None),
        (86, torch.float32, 256, 1, 30.0),  # the largest blocks, on a GPU with little memory
    ]
    for capability, dtype, head_dim, window, softcap in cases:
        driver.capability = capability
        about = (capability, str(dtype).removeprefix("torch."), head_dim)
        call_all(dtype, head_dim, window, softcap)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
