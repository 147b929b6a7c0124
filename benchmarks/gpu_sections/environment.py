"""What this is measured on, and of which code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu_sections.bench import Bench
from gpu_sections.record import Figures, Record

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "greenlet", "numpy", "flash-attn")
_ASKED = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"


def run(bench: Bench, record: Record) -> None:
    record.attempt(labels(bench), lambda: figures(bench))


def labels(bench: Bench) -> dict[str, Any]:
    """Names and versions; null where there is none."""
    found: dict[str, Any] = {"device": bench.machine.name, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    if bench.machine.is_cuda:
        properties = torch.cuda.get_device_properties(bench.machine.device)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["cudnn"] = torch.backends.cudnn.version()
        found["nvidia_smi"] = _nvidia_smi()
    return found


def figures(bench: Bench) -> Figures:
    found: dict[str, tuple[float | None, str]] = {"cpu_cores": (os.cpu_count(), "cores")}
    if bench.machine.is_cuda:
        properties = torch.cuda.get_device_properties(bench.machine.device)
        found["memory"] = (properties.total_memory, "bytes")
        found["free_memory"] = (bench.machine.available_bytes(), "bytes")
        found["multiprocessors"] = (properties.multi_processor_count, "multiprocessors")
    return found


def _nvidia_smi() -> str | None:
    """What torch does not know: the driver's version, limits of power and clocks."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
