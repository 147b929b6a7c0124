"""Which share of what this machine can do at best do reading a prompt and a decode step reach?

The ceilings are measured first: products of linear layers' sizes in each dtype, and reading memory.
A prompt's time is compared with its operations at the rate of products. A step's is compared with
the longer of two: its operations, and the bytes of the weights, keys and values that it reads. Ways
of reading are a dtype and how prompts attend, ways of stepping a dtype and `--cpu-step`; all in
turn, the best of `--repeats` and `--steps`.

    python benchmarks/speed/machine_share.py --reading bfloat16:auto,bfloat16:aten-cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, results
from benchmarks.speed.step import Contestant
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.model.cpu.packed_linear import PackedLinear, can_pack

_ROWS = 2048
_MEMORY_BYTES = 1 << 30  # more than any cache


class Reader:
    """A core that reads prompts. `way`: its dtype and how it attends."""

    def __init__(self, model: str, way: str) -> None:
        self.way = way
        dtype, _, backend = way.partition(":")
        named = None if backend == "auto" else backend
        config = ModelConfig(model=model, device="cpu", dtype=dtype, attention_backend=named)  # type: ignore[arg-type]
        engine = EngineConfig(kv_memory_bytes=2 << 30, cache_memory=0.0)
        self.core: Core = build_core(config, engine)

    def read(self, length: int, seed: int) -> float:
        """Seconds until the first token of a prompt."""
        ids = harness.random_ids(length, self.core.model.vocab_size, seed)
        started_s = time.perf_counter()
        for _ in self.core.run_alone(harness.request(ids, "none", 16, 1)):
            pass
        return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--reading", default="bfloat16:auto,bfloat16:aten-cpu")
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 4096])
    parser.add_argument("--stepping", default="bfloat16:auto,bfloat16:off", help="--cpu-step")
    parser.add_argument("--sequences", default="1,8,16", help="ascending (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="of the sequences of a step")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    results.add_common(parser)
    arguments = parser.parse_args()
    readers = [Reader(arguments.model, way) for way in arguments.reading.split(",")]
    steppers = [
        Contestant(arguments, "none", *way.split(":")) for way in arguments.stepping.split(",")
    ]
    cores = [each.core for each in (*readers, *steppers)]
    rates = {dtype: product_rate(dtype) for dtype in {core.model.dtype for core in cores}}
    bandwidth = memory_rate()
    ceilings = {f"{dtype} products, GFLOP/s": rate / 1e9 for dtype, rate in rates.items()}
    rows: list[dict[str, Any]] = [
        {"what": name, "measured": rate}
        for name, rate in {**ceilings, "memory, GB/s": bandwidth / 1e9}.items()
    ]
    for length in arguments.lengths:
        rows += _reading(readers, length, rates, arguments.repeats)
    for count in results.numbers(arguments.sequences):
        rows += _decoding(steppers, count, rates, bandwidth, arguments)
    results.finish("machine_share", "cpu", rows, arguments.json)


def product_rate(dtype: torch.dtype) -> float:
    """Operations a second of the best of three sizes of linear layers, as the model has them."""
    taken = []
    for ins, outs in ((576, 1536), (1536, 576), (2048, 2048)):
        layer: Any = nn.Linear(ins, outs, bias=False).to(dtype).requires_grad_(False)
        if can_pack(torch.device("cpu"), dtype):
            layer = PackedLinear(layer)
        x = torch.randn(1, _ROWS, ins).to(dtype)
        taken.append(2.0 * _ROWS * ins * outs / _best_s(lambda layer=layer, x=x: layer(x), 40))
    return max(taken)


def memory_rate() -> float:
    """Bytes a second that are read: sums of numbers, of several sizes of them."""
    numbers = torch.ones(_MEMORY_BYTES // 4)
    return max(
        _MEMORY_BYTES / _best_s(lambda view=view: view.sum(), 5)
        for view in (numbers, numbers.view(torch.int64), numbers.view(torch.float64))
    )


def _best_s(work: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _reading(
    readers: list[Reader], length: int, rates: dict[torch.dtype, float], repeats: int
) -> list[dict[str, Any]]:
    results.note(f"reading {length} tokens")
    best = [float("inf")] * len(readers)
    for turn in range(repeats + 1):
        for index, reader in enumerate(readers):
            taken = reader.read(length, turn)
            if turn:  # the first one warms up
                best[index] = min(best[index], taken)
    rows = []
    for reader, taken in zip(readers, best, strict=True):
        model = reader.core.model
        ideal = (model.shape.prefill_chunk(0, length) + model.shape.head()) / rates[model.dtype]
        rows.append(_row(f"reading {length} tokens", reader.way, taken, ideal))
    return rows


def _decoding(
    steppers: list[Contestant],
    count: int,
    rates: dict[torch.dtype, float],
    bandwidth: float,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    results.note(f"steps of {count}")
    for stepper in steppers:
        stepper.grow(count)
    best = [float("inf")] * len(steppers)
    for _ in range(arguments.steps):
        for index, stepper in enumerate(steppers):
            best[index] = min(best[index], stepper.step()[0])
    rows, length = [], arguments.prompt_tokens
    for stepper, taken in zip(steppers, best, strict=True):
        model = stepper.core.model
        flops = count * (model.shape.prefill_chunk(length, 1) + model.shape.head())
        linear = [module for module in model.hf.modules() if isinstance(module, nn.Linear)]
        weights = sum(module.in_features * module.out_features for module in linear)
        read = weights * model.shape.element_bytes + count * model.shape.whole_bytes(length)
        ideal = max(flops / rates[model.dtype], read / bandwidth)
        way = f"{stepper.dtype}:{stepper.cpu_step}"
        rows.append(_row(f"step of {count}", way, taken, ideal))
    return rows


def _row(what: str, way: str, taken_s: float, ideal_s: float) -> dict[str, Any]:
    return {
        "what": what,
        "way": way,
        "ms": taken_s * 1e3,
        "at_best_ms": ideal_s * 1e3,
        "share": ideal_s / taken_s,
    }


if __name__ == "__main__":
    main()
