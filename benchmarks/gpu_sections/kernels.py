"""Does every Triton kernel give what its plain twin gives?

Inputs lie amid NaN and outputs are NaN before, so that an element not written shows, and so does
one read from beyond a tensor.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from gpu_sections import kernel_cases
from gpu_sections.bench import Bench
from gpu_sections.machine import Machine
from gpu_sections.record import Figures, Record


def run(bench: Bench, record: Record) -> None:
    wanted = kernel_cases.SMALL
    if bench.machine.is_cuda:
        wanted = kernel_cases.LLAMA + kernel_cases.SMALL + kernel_cases.far(bench.scale.far_rows)
    for make, sizes in wanted:
        labels = {"kernel": make.__name__, **{k: _shown(v) for k, v in sizes.items()}}
        record.attempt(labels, partial(_compare, bench.machine, make, sizes))
        bench.machine.free()


def _shown(size: Any) -> Any:
    if isinstance(size, tuple) and len(size) > 4:
        return f"{len(size)} from {min(size)} to {max(size)}"
    return str(size).removeprefix("torch.") if isinstance(size, torch.dtype | tuple) else size


def _compare(machine: Machine, make: kernel_cases.Make, sizes: dict[str, Any]) -> Figures:
    """Every output's largest error and its bound, and whether all are within."""
    torch.manual_seed(0)
    case = make(machine, **sizes)
    with poisoned():
        ours = case.run(importlib.import_module(f"gemserve_kernels.{case.twin}"))
    machine.synchronize()
    theirs = case.run(importlib.import_module(f"gemserve_kernels.{case.plain}"))
    found: dict[str, tuple[float | None, str]] = {}
    for name, bound in case.bounds.items():
        found[f"{name}_error"] = (largest_error(ours[name], theirs[name]), "1")
        found[f"{name}_bound"] = (bound, "1")
    is_within = all(found[f"{name}_error"][0] <= bound for name, bound in case.bounds.items())
    return {"is_within_bounds": (int(is_within), "bool"), **found}


def largest_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest value of its row, if that is beyond 1.

    Infinite where only one of the two is finite, or if shapes or dtypes differ.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    left, right = ours.double(), theirs.double()
    is_same = (left == right) | (left.isnan() & right.isnan())
    size = right.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True).clamp_min(1)
    error = ((left - right).abs() / size).nan_to_num(nan=math.inf)
    return float(error.masked_fill(is_same, 0.0).max())


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, what `torch.empty` makes is NaN."""
    make = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        made = make(*size, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    with mock.patch.object(torch, "empty", empty):
        yield
