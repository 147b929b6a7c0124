"""How long do streams and health checks wait while a text of many megabytes is read in windows?

A server is started. Streams run, and /health is asked ten times a second. Then a chat with a long
text comes in, which is cancelled if it is not answered after some seconds. The rows have the
largest gap between two tokens of a stream and the slowest health check meanwhile, for each phase of
the request: until the engine has it, and from then on. They have the time until a cancelled request
is gone, and the most memory that the server has had so far.

    python benchmarks/robustness/long_prompt_gap.py --chars 3500000 --window 1024
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
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

_START_S = 120
_REST_S = 2.0
_PAUSE_S = 0.1
_RUNNING = re.compile(r"^gemserve_num_requests_running (\S+)$", re.MULTILINE)
Timed = list[tuple[float, float]]  # when something began, and how long it took, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--chars", type=int, default=3_500_000, help="of the text: no more than 4 million tokens"
    )
    parser.add_argument("--window", default="1024", help="tokens, or off")
    parser.add_argument("--read-s", type=float, default=10.0, help="until it is cancelled")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    results.add_common(parser)
    arguments = parser.parse_args()
    options = ["--model", arguments.model, "--served-model-name", "served"]
    options += ["--kv-memory", "1GiB", "--max-prompt-tokens", "8000000"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        server = ServeProcess(options, Path(folder) / "log", environment)
        try:
            server.wait_until_ready(_START_S)
            rows = asyncio.run(_measured(server, arguments))
        finally:
            server.stop(30)
    results.finish("long_prompt_gap", arguments.device, rows, arguments.json)


async def _measured(server: ServeProcess, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    gaps: Timed = []
    waits: Timed = []
    # without certificates, which take longer to load than a request takes
    async with httpx.AsyncClient(base_url=server.url, timeout=900, verify=False) as client:
        acts = [_stream(client, gaps) for _ in range(arguments.streams)] + [_ask(client, waits)]
        tasks = [asyncio.create_task(act) for act in acts]
        await asyncio.sleep(_REST_S)
        for number, kind in enumerate(arguments.kinds):
            segment_size = arguments.window if arguments.window == "off" else int(arguments.window)
            body = {
                "model": "served",
                "messages": [{"role": "user", "content": KINDS[kind](arguments.chars, number)}],
                "max_tokens": 8,
                "stream": True,
                "filter": {"method": "sieve", "keep": 512, "window": segment_size},
            }
            row = await _one(client, body, arguments.read_s)
            for phase in ("building", "reading"):
                began_s, ended_s = row.pop(phase)
                row[f"{phase}_s"] = ended_s - began_s
                for name, timed in (("gap", gaps), ("health", waits)):
                    during = [took for at, took in timed if at + took > began_s and at < ended_s]
                    row[f"{phase}_median_{name}_s"] = statistics.median(during or [0.0])
                    row[f"{phase}_largest_{name}_s"] = max(during, default=0.0)
            rows.append({"kind": kind, "chars": arguments.chars, "window": segment_size, **row})
            rows[-1]["most_memory_bytes"] = _most_bytes(server)
            results.note(str(rows[-1]))
            await asyncio.sleep(_REST_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rows


async def _one(client: httpx.AsyncClient, body: dict[str, Any], read_s: float) -> dict[str, Any]:
    """Send a request; the reply's headers come when the engine has it."""
    began_s = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        built_s = time.perf_counter()
        row: dict[str, Any] = {"status": reply.status_code, "building": (began_s, built_s)}
        try:
            async with asyncio.timeout(read_s):
                row["said"] = (await reply.aread()).decode()[:200]
        except TimeoutError:
            row["said"] = None
        ended_s = time.perf_counter()
        before = await _running(client)
    while row["said"] is None and await _running(client) >= before:
        await asyncio.sleep(0.02)
    return row | {"freed_s": time.perf_counter() - ended_s, "reading": (built_s, ended_s)}


async def _running(client: httpx.AsyncClient) -> float:
    found = _RUNNING.search((await client.get("/metrics")).text)
    assert found is not None
    return float(found[1])


async def _stream(client: httpx.AsyncClient, gaps: Timed) -> None:
    """Read streams one after another."""
    body = {"model": "served", "prompt": "Once upon a time", "max_tokens": 1500}
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
        await asyncio.sleep(_PAUSE_S)


def _prose(num_chars: int, seed: int) -> str:
    """Paragraphs of sentences of made-up words, and a question."""
    rng = random.Random(seed)
    letters = "etaoinshrdlu"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
    parts: list[str] = []
    left = num_chars
    while left > 0:
        sentences = [
            " ".join(rng.choices(words, k=rng.randint(5, 20))).capitalize() + "."
            for _ in range(rng.randint(2, 8))
        ]
        parts.append(" ".join(sentences) + "\n\n")
        left -= len(parts[-1])
    return "".join(parts) + "What does the third paragraph say?"


KINDS = {
    "prose": _prose,
    "newlines": lambda count, _: "\n" * count + "What is written there?",
    "one word": lambda count, _: "hello " * (count // 6) + "\n\nWhat is written there?",
}


def _most_bytes(server: ServeProcess) -> int:
    """The most memory that the server's process has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


if __name__ == "__main__":
    main()
