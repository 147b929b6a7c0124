"""How long a decode step of the engine takes on a CPU: by sequences, dtype and `--cpu-step`.

Draws are greedy and random tokens are the prompts. The contestants take turns, step by step. The
lower quartile of steps is reported, by the clock and as processor time of all threads. On a busy
machine only the processor time of one thread (OMP_NUM_THREADS=1) says something.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, results
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import build_core
from gemserve.engine.core import Core

_WARM_UP_STEPS = 3


class Contestant:
    """An engine with these settings, and the sequences that it decodes."""

    def __init__(self, arguments: argparse.Namespace, dtype: str, cpu_step: str) -> None:
        self.dtype, self.cpu_step = dtype, cpu_step
        most = max(results.numbers(arguments.sequences))
        self._length = arguments.prompt_tokens
        self._room = self._length + 1024  # more tokens than will be drawn
        config = EngineConfig(
            kv_memory_bytes=2 << 30, cache_memory=0.0, max_running=most, cpu_step=cpu_step
        )
        self.core: Core = build_core(ModelConfig(model=arguments.model, dtype=dtype), config)
        self._count = 0

    def grow(self, count: int) -> None:
        """Read prompts until `count` sequences decode, and then take some steps."""
        vocab_size = self.core.model.vocab_size
        made = [
            self.core.add(
                harness.request(
                    harness.random_ids(self._length, vocab_size, seed), "none", 16, self._room
                )
            )
            for seed in range(self._count, count)
        ]
        self._count = count
        while any(not job.sequence.generated for job in made):
            self.core.step()
        for _ in range(_WARM_UP_STEPS):
            self.core.step()

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
    parser.add_argument("--sequences", default="1,8,16", help="ascending (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    results.add_common(parser)
    arguments = parser.parse_args()
    pairs = itertools.product(arguments.dtypes.split(","), arguments.cpu_step.split(","))
    contestants = [Contestant(arguments, dtype, cpu_step) for dtype, cpu_step in pairs]
    rows: list[dict[str, Any]] = []
    for count in results.numbers(arguments.sequences):
        results.note(f"{count} sequences")
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
        labels = {"sequences": count, "dtype": contestant.dtype, "cpu_step": contestant.cpu_step}
        figures = {"ms": step_s * 1e3, "processor_ms": busy_s * 1e3, "tokens_per_s": count / step_s}
        rows.append(labels | figures)
    return rows


if __name__ == "__main__":
    main()
