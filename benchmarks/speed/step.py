"""How long a decode step takes on a CPU, by sequences, dtype, adapter, `--cpu-step`, `--weights`.

Adapters are random; a prefix is that of random tokens. With `mixed` the sequences have none, NTK's
term, a prefix, an activation vector and a LoRA in turn. Draws are greedy and random tokens are the
prompts. The contestants take turns, step by step. The lower quartile of steps is reported, by the
clock and as processor time of all threads. On a busy machine only the processor time of one thread
(OMP_NUM_THREADS=1) says something.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, results
from gemserve.adapters import lora
from gemserve.adapters.activation import Activation
from gemserve.adapters.ntk import NTK
from gemserve.adapters.prefix import Prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.requests import Request
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.model.adapter import Adapter
from gemserve.model.passes.causal_model import CausalModel

_WARM_UP_STEPS = 3
_KINDS = ("none", "ntk", "prefix", "activation", "lora")
_PREFIX, _NTK_SIZE, _LORA_RANK = 100, 16, 8
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def random_adapter(kind: str, model: CausalModel) -> Adapter | None:
    """A small change to the model, so that its numbers stay ordinary."""
    shape, generator = model.shape, torch.Generator().manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return 0.02 * torch.randn(*size, generator=generator)

    if kind == "none":
        return None
    lead = (shape.num_layers, shape.num_heads)
    if kind == "ntk":
        z_a = numbers(*lead, shape.head_dim, _NTK_SIZE)
        z_b = numbers(*lead, _NTK_SIZE, shape.head_dim)
        return NTK("a", "1", z_a=z_a, z_b=z_b, k=numbers(*lead, shape.head_dim).abs())
    if kind == "prefix":
        return _prefix_of_text(model)
    if kind == "activation":
        vector = numbers(shape.hidden_size).to(model.dtype)
        return Activation("a", "1", vector=vector, layer=shape.num_layers // 2)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.hf.named_modules():
        if name.rsplit(".", 1)[-1] in _LORA_TARGETS:
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = numbers(_LORA_RANK, module.in_features)
            tensors[f"{key}.lora_B.weight"] = numbers(module.out_features, _LORA_RANK)
    return lora.build("a", "1", tensors, {"r": _LORA_RANK, "lora_alpha": 16}, model)


def _prefix_of_text(model: CausalModel) -> Prefix:
    """The keys and values of random tokens: with random ones a model's numbers are not ordinary."""
    layers = range(model.num_layers)
    memory = model.new_memory(2 * len(layers) * _PREFIX)
    kv = memory.kv(0, num_layers=len(layers), capacity=_PREFIX)
    ids = harness.random_ids(_PREFIX, model.vocab_size, 0)
    model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=_PREFIX, is_last=False)
    keys, values = zip(*(kv.read(layer, _PREFIX) for layer in layers), strict=True)
    return Prefix("a", "1", keys=torch.stack(keys), values=torch.stack(values))


class Contestant:
    """An engine with these settings, and the sequences that it decodes."""

    def __init__(
        self, arguments: argparse.Namespace, kind: str, dtype: Any, cpu_step: Any, weights: Any
    ) -> None:
        self.kind, self.dtype, self.cpu_step, self.weights = kind, dtype, cpu_step, weights
        most = max(results.numbers(arguments.sequences))
        self._length = arguments.prompt_tokens
        self._room = self._length + 1024  # more tokens than will be drawn
        config = EngineConfig(
            prompt_lookup="off",
            kv_memory_bytes=2 << 30,
            cache_memory=0.0,
            max_running=most,
            cpu_step=cpu_step,
        )
        model = ModelConfig(model=arguments.model, dtype=dtype, weights=weights)
        self.core: Core = build_core(model, config)
        kinds = _KINDS if kind == "mixed" else (kind,)
        self._adapters = [random_adapter(each, self.core.model) for each in kinds]
        self._count = 0

    def grow(self, count: int) -> None:
        """Read prompts until `count` sequences decode, and then take some steps."""
        made = [self.core.add(self._request(seed)) for seed in range(self._count, count)]
        self._count = count
        while any(not job.sequence.generated for job in made):
            self.core.step()
        for _ in range(_WARM_UP_STEPS):
            self.core.step()

    def _request(self, seed: int) -> Request:
        ids = harness.random_ids(self._length, self.core.model.vocab_size, seed)
        made = harness.request(ids, "none", 16, self._room)
        adapter = self._adapters[seed % len(self._adapters)]
        sampling = replace(made.sampling, ignore_eos=True)
        return replace(made, adapter=adapter, sampling=sampling)

    def step(self) -> tuple[float, float]:
        """Seconds and processor seconds of one step of all sequences."""
        started_s, busy_s = time.perf_counter(), time.process_time()
        self.core.step()
        taken = time.perf_counter() - started_s, time.process_time() - busy_s
        assert self.core.num_running == self._count, "a sequence has ended"
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--cpu-step", default="off,on", help="default: %(default)s")
    parser.add_argument("--weights", default="auto", help="auto,dense (default: %(default)s)")
    parser.add_argument("--adapters", default="none", help=f"{', '.join(_KINDS)}, mixed")
    parser.add_argument("--sequences", default="1,8,16", help="ascending (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    results.add_common(parser)
    arguments = parser.parse_args()
    lists = (arguments.dtypes, arguments.cpu_step, arguments.weights)
    ways = list(itertools.product(*(names.split(",") for names in lists)))
    rows: list[dict[str, Any]] = []
    for kind in arguments.adapters.split(","):
        contestants = [Contestant(arguments, kind, *way) for way in ways]
        for count in results.numbers(arguments.sequences):
            results.note(f"{count} sequences, adapter {kind}")
            rows += _measure(contestants, count, arguments.steps)
    results.finish("step", "cpu", rows, arguments.json)


def _measure(contestants: list[Contestant], count: int, steps: int) -> list[dict[str, Any]]:
    for contestant in contestants:
        contestant.grow(count)
    taken: list[list[tuple[float, float]]] = [[] for _ in contestants]
    for _ in range(steps):
        for contestant, pairs in zip(contestants, taken, strict=True):
            pairs.append(contestant.step())
    rows: list[dict[str, Any]] = []
    for contestant, pairs in zip(contestants, taken, strict=True):
        step_s, busy_s = (statistics.quantiles(times, n=4)[0] for times in zip(*pairs, strict=True))
        labels = {
            "adapter": contestant.kind,
            "sequences": count,
            "dtype": contestant.dtype,
            "cpu_step": contestant.cpu_step,
            "weights": contestant.weights,
        }
        figures = {"ms": step_s * 1e3, "processor_ms": busy_s * 1e3, "tokens_per_s": count / step_s}
        rows.append(labels | figures)
    return rows


if __name__ == "__main__":
    main()
