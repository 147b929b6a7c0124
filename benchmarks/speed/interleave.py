"""How much does a long prompt delay the streams beside it, and how much do they delay it?

Streams decode. Then a long prompt arrives and is filtered, with `--window` in windows. The result
has the gaps between the streams' tokens without the prompt and while it is read (p50, p99), and the
prompt's time to first token alone and beside the streams. All of it uses one configuration.
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
from gemserve.cli.options import read_bytes
from gemserve.contract.events import TextDelta
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job


def start_streams(core: Core, count: int, prompt_tokens: int, max_tokens: int) -> list[Job]:
    """`count` sequences that decode for longer than anything here lasts."""
    prompts = [harness.random_ids(prompt_tokens, core.model.vocab_size, i) for i in range(count)]
    jobs = [core.add(harness.request(ids, "none", 16, max_tokens)) for ids in prompts]
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
    parser.add_argument("--window", type=int, help="tokens; default: the prompt in one pass")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--stream-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument(
        "--max-tokens", type=int, default=20_000, help="of a stream (default: %(default)s)"
    )
    parser.add_argument("--kv-memory", type=read_bytes, default="8GiB", help="default: %(default)s")
    harness.add_shape_option(parser)
    harness.add_dtype_option(parser)
    harness.add_prompt_options(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    names = ("method", "window", "prompt_tokens", "streams")
    labels = {name: getattr(arguments, name) for name in names}
    rows.attempt(labels, lambda: measure(arguments))
    results.finish("interleave", arguments.device, rows, arguments.json)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = harness.random_llama(arguments.device, shape=arguments.shape, dtype=arguments.dtype)
    chunk, keep = arguments.chunk_tokens, arguments.keep
    core = harness.build_core(
        model,
        shape=arguments.shape,
        kv_memory_bytes=harness.pool_bytes(arguments.kv_memory, arguments.device),
        **({"max_chunk_tokens": int(chunk)} if chunk else {}),
    )
    ids = harness.random_ids(arguments.prompt_tokens, core.model.vocab_size, seed=99)

    def read(num_tokens: int, jobs: list[Job]) -> tuple[float, list[float]]:
        """Seconds to the first token of a prompt, and the streams' gaps meanwhile."""
        asked = harness.request(
            ids[:num_tokens], arguments.method, keep, 1, segment_size=arguments.window or "off"
        )
        started_s = time.perf_counter()
        job = core.add(asked)
        gaps = gaps_during(core, jobs, job, 0)
        return time.perf_counter() - started_s, gaps

    read(arguments.warm_up_tokens, [])
    results.note("the long prompt alone")
    alone_s, _ = read(len(ids), [])
    results.note("the streams alone")
    jobs = start_streams(core, arguments.streams, arguments.stream_tokens, arguments.max_tokens)
    gaps_during(core, jobs, None, 20)
    quiet = gaps_during(core, jobs, None, 150)
    results.note("together")
    beside_s, busy = read(len(ids), jobs)
    for job in jobs:
        core.cancel(job)
    return {
        "gap_p50_s": float(np.percentile(quiet, 50)),
        "gap_p99_s": float(np.percentile(quiet, 99)),
        "gap_p50_beside_s": float(np.percentile(busy, 50)),
        "gap_p99_beside_s": float(np.percentile(busy, 99)),
        "gap_p99_ratio": float(np.percentile(busy, 99) / np.percentile(quiet, 99)),
        "ttft_alone_s": alone_s,
        "ttft_beside_s": beside_s,
        "ttft_ratio": beside_s / alone_s,
    }


if __name__ == "__main__":
    main()
