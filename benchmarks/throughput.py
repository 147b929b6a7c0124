"""Requests per second of many long prompts at once: each filter method against reading everything.

A closed loop over one engine: `--concurrency` requests are always in progress until all have been
sent. `bound` is the ratio of the operations of a whole request, prompt and decoding, as the cost
model counts them; `fraction_of_bound` how much of it was reached.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import harness
import results

from gemserve.cli.option_readers import read_bytes
from gemserve.engine.core import Core
from gemserve.engine.job import Job
from gemserve.model.causal_model import CausalModel
from gemserve.types import FilterMethod, Finished, Request


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
    harness.add_variants_option(parser)
    harness.add_prompt_options(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    model = harness.random_llama(arguments.device, shape=arguments.shape)
    shape = CausalModel(model).shape
    layer, keep = harness.SHAPES[arguments.shape].filter_layer, arguments.keep
    length, max_tokens = arguments.prompt_tokens, arguments.max_tokens

    def flops(method: FilterMethod) -> tuple[float, float]:
        """FLOPs of reading a prompt, and of the whole request."""
        kept = length if method == "none" else min(keep, length)
        decoding = sum(
            shape.prefill_chunk(kept + i, 1) + shape.head() for i in range(max_tokens - 1)
        )
        prompt = shape.prompt_flops(method, length, keep, layer)
        return prompt, prompt + decoding

    methods: list[Any] = arguments.methods.split(",")
    first_per_s: float | None = None
    contestants = [
        (name, method)
        for name in arguments.variants.split(",")
        for method in harness.VARIANTS[name].methods or methods
    ]
    for index, (variant, method) in enumerate(contestants):
        labels: dict[str, Any] = {
            "variant": variant,
            "method": method,
            "prompt_tokens": length,
            "max_tokens": max_tokens,
            "requests": arguments.requests,
            "concurrency": arguments.concurrency,
        }
        obstacle = harness.VARIANTS[variant].find_obstacle(arguments.device)
        if obstacle is not None:
            rows.put(labels, {"reason": obstacle})
            continue

        def measure(
            variant: str = variant, method: Any = method, labels: Any = labels, index: int = index
        ) -> dict[str, Any]:
            nonlocal first_per_s
            ends_s = time.perf_counter() + rows.left_s / (len(contestants) - index)
            core = _core(arguments, model, variant)
            labels |= harness.served_labels(core, variant)
            warm_up = [_request(core, arguments.warm_up_tokens, method, keep, 2, seed=0)]
            _serve(core, warm_up, 1, "warm-up", ends_s)
            asked = [
                _request(core, length, method, keep, max_tokens, seed=i)
                for i in range(arguments.requests)
            ]
            finished, seconds = _serve(core, asked, arguments.concurrency, method, ends_s)
            if not finished:
                raise results.OutOfTime
            rate = finished / seconds
            first_per_s = first_per_s or rate
            bound = flops(methods[0])[1] / flops(method)[1]
            return {
                "requests_per_s": rate,
                "ratio_to_first": rate / first_per_s,
                "bound": bound,
                "fraction_of_bound": rate / first_per_s / bound,
                "prompt_tokens_per_s": rate * length,
                "generated_tokens_per_s": rate * max_tokens,
                "flops_to_none": flops(method)[0] / flops("none")[0],
                "finished": finished,
                "asked": arguments.requests,
                "seconds": seconds,
            }

        rows.attempt(labels, measure)
        results.free(arguments.device)
    results.finish("throughput", arguments.device, rows, arguments.json)


def _core(arguments: argparse.Namespace, model: Any, variant: str) -> Core:
    chunk = arguments.chunk_tokens
    return harness.build_core(
        model,
        shape=arguments.shape,
        variant=variant,
        kv_memory_bytes=harness.pool_bytes(arguments.kv_memory, arguments.device),
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
