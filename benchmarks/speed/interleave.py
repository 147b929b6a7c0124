"""How much does a long prompt delay the streams beside it, and how much do they delay it?

Eight streams decode. Then a long prompt arrives and is filtered. The result has the gaps between
the streams' tokens without the prompt and while it is read (p50, p99), and the prompt's time to
first token alone and beside the streams. All of it uses one configuration.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import numpy as np

from benchmarks.shared import harness, results
from gemserve.contract.events import TextDelta
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job


def request(ids: list[int], method: FilterMethod, keep: int, max_tokens: int) -> Request:
    return Request(
        request_id="interleave",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method=method, keep=keep),
    )


def start_streams(core: Core, count: int, prompt_tokens: int) -> list[Job]:
    """`count` sequences that decode for longer than anything here lasts."""
    prompts = [harness.random_ids(prompt_tokens, core.model.vocab_size, i) for i in range(count)]
    jobs = [core.add(request(ids, "none", 16, 20_000)) for ids in prompts]
    while any(not job.sequence.generated for job in jobs):
        core.step()
    return jobs


def gaps_during(core: Core, jobs: list[Job], until: Job | None, steps: int) -> list[float]:
    """Gaps between the streams' tokens: for `steps` steps, or until `until` has its first token."""
    last = dict.fromkeys(jobs, time.perf_counter())
    gaps: list[float] = []
    while steps > 0 if until is None else not until.sequence.generated:
        for job, event in core.step():
            if isinstance(event, TextDelta) and job in last:
                now = time.perf_counter()
                gaps.append(now - last[job])
                last[job] = now
        steps -= 1
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=32768, help="default: %(default)s")
    parser.add_argument("--method", default="sieve", help="default: %(default)s")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--stream-tokens", type=int, default=1024, help="default: %(default)s")
    harness.add_dtype_option(parser)
    results.add_common(parser)
    arguments = parser.parse_args()
    core = harness.build_core(
        harness.random_llama(arguments.device, dtype=arguments.dtype), kv_memory_bytes=8 << 30
    )
    ids = harness.random_ids(arguments.prompt_tokens, core.model.vocab_size, seed=99)
    long = request(ids, arguments.method, arguments.keep, 1)

    def ttft(jobs: list[Job]) -> tuple[float, list[float]]:
        started_s = time.perf_counter()
        job = core.add(long)
        gaps = gaps_during(core, jobs, job, 0)
        return time.perf_counter() - started_s, gaps

    core_warm = core.add(request(ids[:2048], arguments.method, 256, 1))
    gaps_during(core, [], core_warm, 0)
    results.note("the long prompt alone")
    alone_s, _ = ttft([])
    results.note("the streams alone")
    jobs = start_streams(core, arguments.streams, arguments.stream_tokens)
    gaps_during(core, jobs, None, 20)
    quiet = gaps_during(core, jobs, None, 150)
    results.note("together")
    beside_s, busy = ttft(jobs)
    for job in jobs:
        core.cancel(job)
    row: dict[str, Any] = {
        "method": arguments.method,
        "dtype": harness.dtype_name(core),
        "prompt_tokens": arguments.prompt_tokens,
        "streams": arguments.streams,
        "gap_p50_s": float(np.percentile(quiet, 50)),
        "gap_p99_s": float(np.percentile(quiet, 99)),
        "gap_p50_beside_s": float(np.percentile(busy, 50)),
        "gap_p99_beside_s": float(np.percentile(busy, 99)),
        "gap_p99_ratio": float(np.percentile(busy, 99) / np.percentile(quiet, 99)),
        "ttft_alone_s": alone_s,
        "ttft_beside_s": beside_s,
        "ttft_ratio": beside_s / alone_s,
    }
    results.finish("interleave", arguments.device, [row], arguments.json)


if __name__ == "__main__":
    main()
