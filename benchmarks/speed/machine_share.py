"""Which share of what this machine can do at best do reading a prompt and a decode step reach?

The ceilings are measured first: products of linear layers' sizes in each dtype, products of bytes
(oneDNN's, without scales), and reading memory. A prompt's time is compared with its operations at
these rates, weights in blocks at the rate of bytes. A step's is compared with the longer of two:
its operations, and the bytes of the weights, keys and values that it reads. Ways of reading are a
dtype and how prompts attend, ways of stepping a dtype and `--cpu-step`; all in turn, the best of
`--repeats` and `--steps`.

    python benchmarks/speed/machine_share.py --reading bfloat16:auto,bfloat16:aten-cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
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
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.blocks import BlockWeight

_ROWS = 2048
_SIZES = ((576, 1536), (1536, 576), (2048, 2048))  # inputs and outputs
_MEMORY_BYTES = 1 << 30  # more than any cache


class Reader:
    """A core that reads prompts. `way`: its dtype and how it attends."""

    def __init__(self, model: str, weights: Any, way: str) -> None:
        self.way = way
        dtype, _, backend = way.partition(":")
        given: Any = {"dtype": dtype, "attention_backend": backend or "auto", "weights": weights}
        config = ModelConfig(model=model, device="cpu", **given)
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
    parser.add_argument(
        "--weights", choices=("auto", "dense"), default="auto", help="as of `serve`"
    )
    parser.add_argument("--reading", default="bfloat16:auto,bfloat16:aten-cpu")
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 4096])
    parser.add_argument("--stepping", default="bfloat16:auto,bfloat16:off", help="--cpu-step")
    parser.add_argument("--sequences", default="1,8,16", help="ascending (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="of the sequences of a step")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    results.add_common(parser)
    arguments = parser.parse_args()
    readers = [
        Reader(arguments.model, arguments.weights, way) for way in arguments.reading.split(",")
    ]
    steppers = [
        Contestant(arguments, "none", *way.split(":"), arguments.weights)
        for way in arguments.stepping.split(",")
    ]
    cores = [each.core for each in (*readers, *steppers)]
    ceilings = Ceilings({core.model.dtype for core in cores})
    rows = ceilings.rows()
    for length in arguments.lengths:
        rows += _reading(readers, length, ceilings, arguments.repeats)
    for count in results.numbers(arguments.sequences):
        rows += _decoding(steppers, count, ceilings, arguments)
    results.finish("machine_share", "cpu", rows, arguments.json)


class Ceilings:
    """What this machine does at best, a second."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        self.products = {dtype: product_rate(dtype) for dtype in dtypes}
        self.bytes = byte_product_rate()
        self.memory = memory_rate()

    def rows(self) -> list[dict[str, Any]]:
        named = {f"{dtype} products, GFLOP/s": rate for dtype, rate in self.products.items()}
        named |= {"products of bytes, 10^9/s": self.bytes, "memory, GB/s": self.memory}
        return [{"what": name, "measured": rate / 1e9} for name, rate in named.items()]

    def operations_s(self, model: CausalModel, linear: float, other: float) -> float:
        """Seconds of these operations, of linear layers and of all else."""
        rate = self.products[model.dtype]
        return linear / (max(rate, self.bytes) if _has_blocks(model) else rate) + other / rate


def _has_blocks(model: CausalModel) -> bool:
    return any(isinstance(weight, BlockWeight) for weight in model.hf.parameters())


def product_rate(dtype: torch.dtype) -> float:
    """Operations a second of the best of three sizes of linear layers, as the model has them."""
    taken = []
    for ins, outs in _SIZES:
        layer: Any = nn.Linear(ins, outs, bias=False).to(dtype).requires_grad_(False)
        if can_pack(torch.device("cpu"), dtype):
            layer = PackedLinear(layer)
        x = torch.randn(1, _ROWS, ins).to(dtype)
        taken.append(2.0 * _ROWS * ins * outs / _best_s(lambda layer=layer, x=x: layer(x), 40))
    return max(taken)


def byte_product_rate() -> float:
    """Operations a second of products of bytes with sums of 32 bits, of the same sizes."""
    product: Any = torch._int_mm
    taken = []
    for ins, outs in _SIZES:
        x = torch.randint(-128, 128, (_ROWS, ins), dtype=torch.int8)
        weight = torch.randint(-128, 128, (outs, ins), dtype=torch.int8).t()
        seconds = _best_s(partial(product, x, weight), 40)
        taken.append(2.0 * _ROWS * ins * outs / seconds)
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
    readers: list[Reader], length: int, ceilings: Ceilings, repeats: int
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
        shape = model.shape
        linear = 2.0 * shape.layer_params * shape.num_layers * length
        attention = shape.prefill_chunk(0, length) - linear
        ideal = ceilings.operations_s(model, linear + shape.head(), attention)
        rows.append(_row(f"reading {length} tokens", reader.way, taken, ideal))
    return rows


def _decoding(
    steppers: list[Contestant],
    count: int,
    ceilings: Ceilings,
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
        shape = model.shape
        attention = count * shape.step_attention(length)
        linear = count * (shape.prefill_chunk(length, 1) + shape.head()) - attention
        read = _weight_bytes(model) + count * shape.whole_bytes(length)
        operations_s = ceilings.operations_s(model, linear, attention)
        ideal = max(operations_s, read / ceilings.memory)
        way = f"{stepper.dtype}:{stepper.cpu_step}"
        rows.append(_row(f"step of {count}", way, taken, ideal))
    return rows


def _weight_bytes(model: CausalModel) -> int:
    """Bytes of all matrices that a step reads: those of linear layers, with the output head."""
    weights = [module.weight for module in model.hf.modules() if isinstance(module, nn.Linear)]
    return sum(
        weight.stored_bytes if isinstance(weight, BlockWeight) else weight.nbytes
        for weight in weights
    )


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
