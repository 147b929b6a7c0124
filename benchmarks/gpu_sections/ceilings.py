"""What the device can do at best, measured in this run: everything else is a share of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu_sections.bench import Bench
from gpu_sections.record import Figures, Record

_SPIN_S = 1.5


def run(bench: Bench, record: Record) -> None:
    record.attempt({"step": "spin up"}, lambda: _spin_up(bench))
    for name, measure in (
        ("copy", _copy),
        ("bf16", _bf16),
        ("fp8", _fp8),
        ("fp8_rowwise", _fp8_rowwise),
    ):
        record.attempt({"ceiling": name}, lambda measure=measure: measure(bench))


def _spin_up(bench: Bench) -> Figures:
    """An idle device has slow clocks, and raises them only under load."""
    size, started_s = bench.scale.matmul_size, time.perf_counter()
    matrix = bench.machine.randn(size, size)
    while bench.machine.is_cuda and time.perf_counter() - started_s < _SPIN_S:
        matrix @ matrix
        bench.machine.synchronize()
    return {"time": (time.perf_counter() - started_s, "s")}


def _copy(bench: Bench) -> Figures:
    """Of bytes read and written."""
    machine, size = bench.machine, bench.scale.copy_bytes
    source = torch.zeros(size, dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    taken_s = machine.seconds(lambda: target.copy_(source), repeats=2 * bench.scale.repeats)
    return {"rate": (2 * size / taken_s, "bytes/s"), "time": (taken_s, "s")}


def _bf16(bench: Bench) -> Figures:
    size = bench.scale.matmul_size
    left, right = (bench.machine.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    return _product(bench, lambda: left @ right)


def _fp8(bench: Bench) -> Figures:
    """One scale for each operand."""
    one = torch.ones((), device=bench.machine.device)
    return _scaled(bench, one, one)


def _fp8_rowwise(bench: Bench) -> Figures:
    """A scale for each row of the left operand and each column of the right one."""
    ones = torch.ones(bench.scale.matmul_size, device=bench.machine.device)
    return _scaled(bench, ones[:, None], ones[None, :])


def _scaled(bench: Bench, left_scale: torch.Tensor, right_scale: torch.Tensor) -> Figures:
    size = bench.scale.matmul_size
    left, right = (
        bench.machine.randn(size, size, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    return _product(
        bench,
        lambda: torch._scaled_mm(
            left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16
        ),
    )


def _product(bench: Bench, multiply: Callable[[], torch.Tensor]) -> Figures:
    taken_s = bench.machine.seconds(multiply, repeats=2 * bench.scale.repeats, warm_up=5)
    return {"rate": (2 * bench.scale.matmul_size**3 / taken_s, "FLOP/s"), "time": (taken_s, "s")}
