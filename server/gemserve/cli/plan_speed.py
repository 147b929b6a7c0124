"""How fast `gemserve plan` takes a machine to be: this one, a known accelerator, or as measured."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemserve.accelerators import DEVICES, MEASURED_EFFICIENCY
from gemserve.cli.options import choice, number, read_value
from gemserve.cost import ModelShape
from gemserve.errors import ConfigError

_ROWS = 512  # tokens of the products that are timed, those of a slice of a long prompt
_MOST_COLUMNS = 16_384
_TIMED_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSpeed:
    """FLOP/s of reading. `is_bound`: reading takes at least the time that follows from it."""

    flops: float
    source: str
    is_bound: bool = False

    def seconds(self, flops: float) -> float:
        return flops / self.flops


# What is read from the options of `add_speed_options`, by their names.
SPEED_READERS: dict[str, Callable[[str], Any]] = {
    "accelerator": choice(*DEVICES),
    "efficiency": number(0.01, 1, float),
    "read_tokens_per_s": number(0.001, kind=float),
}


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "speed", "without these, times are those that this machine's products allow"
    )
    group.add_argument("--accelerator", help=f"one of {', '.join(DEVICES)}")
    group.add_argument(
        "--efficiency",
        help=f"share of its peak FLOP/s that reading reaches (default: {MEASURED_EFFICIENCY})",
    )
    group.add_argument("--read-tokens-per-s", help="measured, by all layers")


def speed_of(
    arguments: argparse.Namespace,
    shape: ModelShape,
    *,
    device: str,
    dtype: Any,
    flops_per_token: float,
) -> ReadingSpeed:
    """The speed that the options say, or that of this machine's products.

    `flops_per_token`: of reading the planned prompt by all layers. Raises `ConfigError`.
    """
    name, share = arguments.accelerator, arguments.efficiency
    measured = arguments.read_tokens_per_s
    if name is not None and measured is not None:
        raise ConfigError(f"read_tokens_per_s={measured}: leave it or accelerator={name} out")
    if share is not None and name is None:
        raise ConfigError(f"efficiency={share}: has an effect only with --accelerator or --fleet")
    if measured is not None:
        tokens = _read("read_tokens_per_s", measured)
        return ReadingSpeed(
            flops=tokens * flops_per_token, source=f"{tokens:g} tokens per second by all layers"
        )
    if name is not None:
        peak = DEVICES[_read("accelerator", name)].peak_flops
        part = _read("efficiency", str(share or MEASURED_EFFICIENCY))
        return ReadingSpeed(
            flops=peak * part, source=f"{part:.0%} of the {peak / 1e12:g} TFLOP/s of one {name}"
        )
    return _this_machine(shape, device, dtype)


def _read(name: str, text: str) -> Any:
    return read_value(name, text, SPEED_READERS[name])


def _this_machine(shape: ModelShape, device: str, dtype: Any) -> ReadingSpeed:
    """Time products of the model's width, of which reading consists for the most part."""
    import torch

    from gemserve.model.loading.loader import resolve_device

    place = resolve_device(device)
    columns = min(4 * shape.hidden_size, _MOST_COLUMNS)
    rows = torch.ones(_ROWS, shape.hidden_size, dtype=dtype, device=place)
    weights = torch.ones(shape.hidden_size, columns, dtype=dtype, device=place)
    best_s = float("inf")
    ends_s = time.perf_counter() + _TIMED_S
    while best_s == float("inf") or time.perf_counter() < ends_s:
        started_s = time.perf_counter()
        product = rows @ weights
        product[0, 0].item()  # waits for a GPU
        best_s = min(best_s, time.perf_counter() - started_s)
    flops = 2.0 * rows.numel() * columns / best_s
    return ReadingSpeed(
        flops=flops,
        source=f"the {flops / 1e9:,.3g} GFLOP/s of products on this machine's {place.type}; "
        "reading does more than products",
        is_bound=True,
    )
