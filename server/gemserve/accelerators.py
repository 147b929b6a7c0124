"""What one accelerator can do: published peaks, and the share of them that is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# H100 80GB, FlashAttention or cuDNN, Llama-3.1-8B's shapes (docs/benchmarks.md): at 131,072 tokens
# `none` reaches 0.53 of the peak FLOP/s, the filter pass 0.53; decode steps reach 0.45 to 0.51 of
# the peak bandwidth with 1 to 256 sequences.
MEASURED_EFFICIENCY = 0.5
MEMORY_SHARE = 0.9  # of the device's memory, for weights, keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peaks of one accelerator: dense bfloat16 FLOP/s, bytes per second, bytes of memory.

    `efficiency`: the share of `peak_flops` that reading reaches; `bandwidth_efficiency`: the share
    of `peak_bandwidth` that a decode step reaches.
    """

    peak_flops: float
    peak_bandwidth: float
    memory_bytes: int
    efficiency: float = MEASURED_EFFICIENCY
    bandwidth_efficiency: float = MEASURED_EFFICIENCY

    @property
    def flops(self) -> float:
        return self.peak_flops * self.efficiency

    @property
    def bandwidth(self) -> float:
        return self.peak_bandwidth * self.bandwidth_efficiency


# NVIDIA's data sheets, SXM modules. For bfloat16 they print twice as much, "with sparsity".
DEVICES: Mapping[str, Device] = {
    "a100": Device(peak_flops=312e12, peak_bandwidth=2.039e12, memory_bytes=80 * 10**9),
    "h100": Device(peak_flops=989.4e12, peak_bandwidth=3.35e12, memory_bytes=80 * 10**9),
    "h200": Device(peak_flops=989.4e12, peak_bandwidth=4.8e12, memory_bytes=141 * 10**9),
}
