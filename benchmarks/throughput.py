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

from gemserve.cli.options import read_bytes
from gemserve.engine.core import Core
from gemserve.engine.job import Job
from gemserve.types import FilterMethod, FilterParams, Finished, Request, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--methods", default="none,sieve", help="default: %(default)s")
    parser.add_argument("--keep", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--kv-memory", type=read_bytes, default="8GiB", help="default: %(default)s")
    harness.add_common(parser)
    arguments = parser.parse_args()
    methods: list[FilterMethod] = arguments.methods.split(",")
    core = harness.build_core(
        harness.random_llama(arguments.device), kv_memory_bytes=arguments.kv_memory
    )
    shape, layer, keep = core.model.shape, harness.FILTER_LAYER, arguments.keep
    length, max_tokens = arguments.prompt_tokens, arguments.max_tokens

    def flops(method: FilterMethod) -> float:
        kept = length if method == "none" else min(keep, length)
        decoding = sum(
            shape.prefill_chunk(kept + i, 1) + shape.head() for i in range(max_tokens - 1)
        )
        return shape.prompt_flops(method, length, keep, layer) + decoding

    rows: list[dict[str, Any]] = []
    for method in methods:
        _serve(core, [_request(core, 2048, method, keep, 2, seed=0)], 1, "warm-up")
        requests = [
            _request(core, length, method, keep, max_tokens, seed=i)
            for i in range(arguments.requests)
        ]
        seconds = _serve(core, requests, arguments.concurrency, method)
        rows.append(
            {
                "method": method,
                "prompt_tokens": length,
                "max_tokens": max_tokens,
                "requests": arguments.requests,
                "concurrency": arguments.concurrency,
                "requests_per_s": arguments.requests / seconds,
            }
        )
    for row, method in zip(rows, methods, strict=True):
        row["ratio_to_first"] = row["requests_per_s"] / rows[0]["requests_per_s"]
        row["bound"] = flops(methods[0]) / flops(method)
        row["fraction_of_bound"] = row["ratio_to_first"] / row["bound"]
    harness.finish("throughput", arguments.device, rows, arguments.json)


def _request(
    core: Core, length: int, method: FilterMethod, keep: int, max_tokens: int, seed: int
) -> Request:
    return Request(
        request_id=f"throughput-{seed}",
        prompt_ids=harness.random_ids(length, core.model.vocab_size, seed),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method=method, keep=keep),
    )


def _serve(core: Core, requests: list[Request], concurrency: int, label: str) -> float:
    """Seconds until all are answered."""
    started_s = time.perf_counter()
    waiting = list(reversed(requests))
    running: set[Job] = set()
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.add(core.add(waiting.pop()))
        for job, event in core.step():
            if isinstance(event, Finished):
                assert event.error is None, event.error
                running.discard(job)
                harness.note(f"{label}: {len(waiting) + len(running)} requests left")
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
