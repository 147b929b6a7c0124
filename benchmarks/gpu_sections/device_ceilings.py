"""What can this device do at best? Its copy bandwidth and its matrix products: the ceilings.

`device_ceilings.py environment` says instead what the device is, and names software versions.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch

from benchmarks.gpu_sections.timing import median_s
from benchmarks.shared import results

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "greenlet", "numpy", "flash-attn")
_NVIDIA_SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"
_SPIN_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("ceilings", "environment"), default="ceilings")
    parser.add_argument("--copy-bytes", type=int, default=1 << 26, help="default: %(default)s")
    parser.add_argument("--matmul-size", type=int, default=1024, help="default: %(default)s")
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    if arguments.what == "environment":
        rows.attempt(environment(arguments.device), lambda: memory(arguments.device))
    else:
        measure_ceilings(arguments, rows)
    results.finish(arguments.what, arguments.device, rows, arguments.json)


def environment(device: str) -> dict[str, Any]:
    """Names and versions, None where there is none."""
    found: dict[str, Any] = {"device": results.device_name(device)}
    found["python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    if device == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["cudnn"] = torch.backends.cudnn.version()
        found["nvidia_smi"] = nvidia_smi()
    return found


def nvidia_smi() -> str | None:
    """What torch does not know: the driver's version, limits of power and clocks."""
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def memory(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu_cores": cpu_count()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory_bytes"] = properties.total_memory
        found["free_memory_bytes"] = torch.cuda.mem_get_info()[0]
        found["multiprocessors"] = properties.multi_processor_count
    return found


def measure_ceilings(arguments: argparse.Namespace, rows: results.Rows) -> None:
    device, size, repeats = arguments.device, arguments.matmul_size, 2 * arguments.repeats

    def spin_up() -> dict[str, Any]:
        """Put the device under load: an idle one has slow clocks."""
        started_s = time.perf_counter()
        matrix = torch.randn(size, size, device=device)
        while device == "cuda" and time.perf_counter() - started_s < _SPIN_S:
            matrix @ matrix
            torch.cuda.synchronize()
        return {"time_s": time.perf_counter() - started_s}

    def copy() -> dict[str, Any]:
        source = torch.zeros(arguments.copy_bytes, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        taken_s = median_s(lambda: target.copy_(source), device, repeats=repeats)
        return {"bytes_per_s": 2 * arguments.copy_bytes / taken_s, "time_s": taken_s}

    def product(multiply: Callable[[], Any]) -> dict[str, Any]:
        taken_s = median_s(multiply, device, repeats=repeats, warm_up=5)
        return {"flops_per_s": 2 * size**3 / taken_s, "time_s": taken_s}

    def bf16() -> dict[str, Any]:
        left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
        return product(lambda: left @ right)

    def fp8(left_scale: torch.Tensor, right_scale: torch.Tensor) -> dict[str, Any]:
        halves = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
        left, right = halves.to(torch.float8_e4m3fn)
        scales = {"scale_a": left_scale, "scale_b": right_scale}
        return product(
            lambda: torch._scaled_mm(left, right.t(), **scales, out_dtype=torch.bfloat16)
        )

    rows.attempt({"step": "spin up"}, spin_up)
    rows.attempt({"ceiling": "copy"}, copy)
    rows.attempt({"ceiling": "bf16"}, bf16)
    one, ones = torch.ones((), device=device), torch.ones(size, 1, device=device)
    rows.attempt({"ceiling": "fp8"}, lambda: fp8(one, one))
    rows.attempt({"ceiling": "fp8_rowwise"}, lambda: fp8(ones, ones.t()))


if __name__ == "__main__":
    main()
