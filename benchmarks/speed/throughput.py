"""Requests per second of many long prompts at once: each filter method against reading everything.

A closed loop over one engine: `--concurrency` requests are always in progress until all have been
sent. `bound` is the ratio of the operations of a whole request, prompt and decoding, as the cost
model counts them; `fraction_of_bound` how much of it was reached.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, results
from gemserve.cli.options import read_bytes
from gemserve.contract.events import Finished
from gemserve.contract.filter_options import FilterMethod
from gemserve.contract.requests import Request
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.filtering.method_cost import prompt_flops
from gemserve.model.passes.causal_model import CausalModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--methods", default="none,sieve", help="default: %(default)s")
    parser.add_argument("--keep", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--kv-memory", type=read_bytes, default="8GiB", help="default: %(default)s")
    harness.add_shape_option(parser)
    harness.add_dtype_option(parser)
    harness.add_variants_option(parser)
    harness.add_prompt_options(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    contest = Contest(arguments)
    methods: list[Any] = arguments.methods.split(",")
    contestants = [
        (name, method)
        for name in arguments.variants.split(",")
        for method in harness.VARIANTS[name].methods or methods
    ]
    for index, (variant, method) in enumerate(contestants):
        labels: dict[str, Any] = {
            "variant": variant,
            "method": method,
            "prompt_tokens": arguments.prompt_tokens,
            "max_tokens": arguments.max_tokens,
            "requests": arguments.requests,
            "concurrency": arguments.concurrency,
        }
        obstacle = harness.VARIANTS[variant].find_obstacle(arguments.device)
        if obstacle is not None:
            rows.put(labels, {"reason": obstacle})
            continue
        ends_s = time.perf_counter() + rows.left_s / (len(contestants) - index)
        rows.attempt(labels, partial(contest.measure, labels, ends_s))
        results.free(arguments.device)
    results.finish("throughput", arguments.device, rows, arguments.json)


class Contest:
    """All contestants on one model, each compared with the first one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._options = arguments
        self._model = harness.random_llama(
            arguments.device, shape=arguments.shape, dtype=arguments.dtype
        )
        self._shape = CausalModel(self._model).shape
        self._first: tuple[float, float] | None = None  # requests per second, FLOPs of a request

    def measure(self, labels: dict[str, Any], ends_s: float) -> dict[str, Any]:
        """Answer all requests, or as many as the time allows. `labels` get how they are served."""
        options, method = self._options, labels["method"]
        core = self._core(labels["variant"])
        labels |= harness.served_labels(core, labels["variant"])
        keep, tokens = options.keep, options.prompt_tokens
        warm_up = [_request(core, options.warm_up_tokens, method, keep, 2, seed=0)]
        _serve(core, warm_up, 1, "warm-up", ends_s)
        asked = [
            _request(core, tokens, method, keep, options.max_tokens, seed=i)
            for i in range(options.requests)
        ]
        finished, seconds = _serve(core, asked, options.concurrency, method, ends_s)
        if not finished:
            raise results.OutOfTime
        rate, (reading, decoding) = finished / seconds, self._flops(method)
        self._first = self._first or (rate, reading + decoding)
        bound = self._first[1] / (reading + decoding)
        return {
            "requests_per_s": rate,
            "ratio_to_first": rate / self._first[0],
            "bound": bound,
            "fraction_of_bound": rate / self._first[0] / bound,
            "prompt_tokens_per_s": rate * tokens,
            "generated_tokens_per_s": rate * options.max_tokens,
            "flops_to_none": reading / self._flops("none")[0],
            "finished": finished,
            "asked": options.requests,
            "seconds": seconds,
        }

    def _flops(self, method: FilterMethod) -> tuple[float, float]:
        """FLOPs of reading a prompt, and of decoding its answer."""
        options, shape = self._options, self._shape
        length, layer = options.prompt_tokens, harness.SHAPES[options.shape].filter_layer
        kept = length if method == "none" else min(options.keep, length)
        steps = range(options.max_tokens - 1)
        decoding = sum(shape.prefill_chunk(kept + i, 1) + shape.head() for i in steps)
        return prompt_flops(shape, method, length, options.keep, layer), decoding

    def _core(self, variant: str) -> Core:
        chunk = self._options.chunk_tokens
        return harness.build_core(
            self._model,
            shape=self._options.shape,
            variant=variant,
            kv_memory_bytes=harness.pool_bytes(self._options.kv_memory, self._options.device),
            **({"max_chunk_tokens": int(chunk)} if chunk else {}),
        )


def _request(
    core: Core, length: int, method: FilterMethod, keep: int, max_tokens: int, seed: int
) -> Request:
    ids = harness.random_ids(length, core.model.vocab_size, seed)
    return harness.request(ids, method, keep, max_tokens)


def _serve(
    core: Core, asked: list[Request], concurrency: int, label: str, ends_s: float
) -> tuple[int, float]:
    """How many requests have finished until all are answered or the time is up, and in how long."""
    started_s = time.perf_counter()
    waiting = list(reversed(asked))
    running: set[Job] = set()
    finished = 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.add(core.add(waiting.pop()))
        for job, event in core.step():
            if isinstance(event, Finished):
                assert event.error is None, event.error
                running.discard(job)
                finished += 1
                results.note(f"{label}: {len(waiting) + len(running)} requests left")
        if time.perf_counter() > ends_s:
            break
    taken_s = time.perf_counter() - started_s
    for job in running:
        core.cancel(job)
    return finished, taken_s


if __name__ == "__main__":
    main()
