"""How long do streams and health checks wait while a request of many choices is planned?

A server is started. A stream runs, and /health is asked ten times a second. Then comes one request
of 128 choices of a long prompt of token ids, filtered by `random` or `position`, which choose
without a pass. The rows have the stream's largest gap and the slowest health check meanwhile.

    python benchmarks/robustness/choices_gap.py --tokens 100000 --choices 128
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results
from benchmarks.shared.server_process import ServeProcess

METHODS = ("random", "position")
_START_S = 120
_REST_S = 2.0
Timed = list[tuple[float, float]]  # when something began, and how long it took, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt")
    parser.add_argument("--choices", type=int, default=128)
    results.add_common(parser)
    arguments = parser.parse_args()
    options = ["--kv-memory", "1GiB", "--max-prompt-tokens", str(arguments.tokens)]
    options += ["--max-queue", str(2 * arguments.choices)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        server = ServeProcess(options, Path(folder) / "log", environment)
        try:
            server.wait_until_ready(_START_S)
            rows = asyncio.run(_measured(server.url, arguments.tokens, arguments.choices))
        finally:
            server.stop(30)
    results.finish("choices_gap", arguments.device, rows, arguments.json)


async def _measured(url: str, tokens: int, choices: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    gaps: Timed = []
    waits: Timed = []
    # without certificates, which take longer to load than a request takes
    async with httpx.AsyncClient(base_url=url, timeout=300, verify=False) as client:
        tasks = [asyncio.create_task(act) for act in (_stream(client, gaps), _ask(client, waits))]
        await asyncio.sleep(_REST_S)
        for method in METHODS:
            body = {
                "model": "builtin",
                "prompt": [300 + token % 700 for token in range(tokens)],
                "max_tokens": 1,
                "n": choices,
                "seed": 1,
                "filter": {"method": method, "keep": 64},
            }
            began_s = time.perf_counter()
            reply = await client.post("/v1/completions", json=body)
            ended_s = time.perf_counter()
            reply.raise_for_status()
            gaps_then, waits_then = (
                [took for at, took in some if at + took > began_s and at < ended_s]
                for some in (gaps, waits)
            )
            rows.append(
                {
                    "method": method,
                    "prompt_tokens": tokens,
                    "n": choices,
                    "request_s": ended_s - began_s,
                    "median_gap_s": statistics.median(gaps_then),
                    "largest_gap_s": max(gaps_then),
                    "slowest_health_s": max(waits_then),
                }
            )
            await asyncio.sleep(_REST_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def _stream(client: httpx.AsyncClient, gaps: Timed) -> None:
    """Read streams one after another."""
    body = {"model": "builtin", "prompt": "Once upon a time", "max_tokens": 4000}
    while True:
        options = {"stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body | options) as reply:
            before_s = time.perf_counter()
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    now_s = time.perf_counter()
                    gaps.append((before_s, now_s - before_s))
                    before_s = now_s


async def _ask(client: httpx.AsyncClient, waits: Timed) -> None:
    while True:
        began_s = time.perf_counter()
        await client.get("/health")
        waits.append((began_s, time.perf_counter() - began_s))
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
