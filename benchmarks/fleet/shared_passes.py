"""How much sooner has a filter chosen from a long document that two replicas read together?

One server with one engine, and one with two replicas on Ray Serve; each engine has one thread. Both
get the same documents in turn, over HTTP: each document is new, then it is asked about once more.
What the filter reports is compared: the kept positions, and the scores of all tokens byte by byte.

    python benchmarks/fleet/shared_passes.py
    python benchmarks/fleet/shared_passes.py --model smollm2 --windows 32 64 --documents 3

The best that two replicas can do is half of one's time. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.shared.server_process import ServeProcess
from gemserve_client.load_test import result_line

START_S, STOP_S, ANSWER_S = 300.0, 30.0, 900.0
FLEETS = (1, 2)  # engines


def document(seed: int, num_lines: int) -> str:
    rng = Random(seed)
    lines = (f"Line {n}: the guard at gate {rng.getrandbits(30)} sleeps." for n in range(num_lines))
    return "\n".join(lines)


def start(model: str, count: int, kv_memory: str, folder: Path) -> ServeProcess:
    options = ["--model", model, "--device", "cpu", "--kv-memory", kv_memory]
    options += ["--max-prompt-tokens", "2000000"]
    options += ["--replicas", str(count)] if count > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return ServeProcess(options, folder / f"log-{count}", environment)


def wait_for_replicas(server: ServeProcess, count: int) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        text = httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
        ups = [line for line in text.splitlines() if line.startswith("gemserve_engine_up")]
        if len(ups) >= count and all(line.endswith(" 1.0") for line in ups):
            return
        time.sleep(0.5)
    raise RuntimeError(f"{count} replicas are not ready within {START_S:g} s")


def choose(
    server: ServeProcess, model: str, text: str, line: int, segment_size: int
) -> dict[str, Any]:
    """What the filter keeps, and the seconds until the client has it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{text}\n\nWho sleeps at line {line}?"}],
        "filter": {
            "window": segment_size,
            "keep": 1024,
            "fallback": False,
            "return_selection": True,
            "return_scores": "exact",
        },
    }
    begin_s = time.monotonic()
    reply = httpx.post(f"{server.url}/v1/filter", json=body, timeout=ANSWER_S)
    seconds = time.monotonic() - begin_s
    if reply.status_code != 200:
        raise RuntimeError(f"status {reply.status_code}: {reply.text[:500]}")
    return {"seconds": seconds, "report": reply.json()["filter"]}


def lent_segments(server: ServeProcess) -> dict[str, float]:
    """Segments that were lent so far, by outcome."""
    found = dict[str, float]()
    for line in httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text.splitlines():
        if line.startswith("gemserve_lent_windows_total"):
            labels, value = line.rsplit(" ", 1)
            outcome = labels.partition('outcome="')[2].partition('"')[0]
            found[outcome] = found.get(outcome, 0.0) + float(value)
    return {outcome: count for outcome, count in found.items() if count}


def run(
    servers: dict[int, ServeProcess], model: str, num_segments: int, segment_size: int, count: int
) -> list[dict[str, Any]]:
    """New documents and then the same ones again, with the servers in turn."""
    sample = choose(servers[1], model, document(0, 400), 7, segment_size)["report"]["prompt_tokens"]
    num_lines = int(400 * num_segments * segment_size / sample)
    for server in servers.values():  # so that each engine knows how fast it is
        choose(server, model, document(1, num_lines // 4), 7, segment_size)
    asked: dict[tuple[int, str], list[dict[str, Any]]] = {}
    is_same = True
    for seed in range(10, 10 + count):
        text = document(1000 * num_segments + seed, num_lines)
        for state, line in (("new", 8), ("cached", 9)):
            order = FLEETS if seed % 2 else FLEETS[::-1]
            found = {
                fleet: choose(servers[fleet], model, text, line, segment_size) for fleet in order
            }
            for fleet, each in found.items():
                asked.setdefault((fleet, state), []).append(each)
            is_same &= chosen(found[1]["report"]) == chosen(found[2]["report"])
    return [
        {
            "replicas": fleet,
            "document": state,
            "median_s": round(statistics.median(each["seconds"] for each in some), 3),
            "filter_ms": round(statistics.median(each["report"]["filter_ms"] for each in some), 1),
            "all_s": [round(each["seconds"], 3) for each in some],
            "windows": some[-1]["report"]["windows"],
            "cached_windows": [each["report"]["cached_windows"] for each in some],
            "prompt_tokens": some[-1]["report"]["prompt_tokens"],
            "is_same": is_same,
        }
        for (fleet, state), some in sorted(asked.items(), key=lambda item: item[0][::-1])
    ]


def chosen(report: dict[str, Any]) -> Any:
    return report["selection"], report["scores"]["tokens"], report["coverage"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--windows", type=int, nargs="+", default=[64])
    parser.add_argument("--window", type=int, default=1024, help="most tokens of one")
    parser.add_argument("--documents", type=int, default=4, help="for each number of windows")
    parser.add_argument("--kv-memory", default="3GiB", help="of each engine")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        servers = dict[int, ServeProcess]()
        for fleet in FLEETS:
            server = start(options.model, fleet, options.kv_memory, Path(folder))
            running.callback(server.stop, STOP_S)
            server.wait_until_ready(START_S)
            wait_for_replicas(server, fleet)
            servers[fleet] = server
        for num_segments in options.windows:
            for row in run(servers, options.model, num_segments, options.window, options.documents):
                rows.append(row)
                print(row, flush=True)
        print("lent windows:", lent_segments(servers[2]), flush=True)
    versions = {"model": options.model, **result_line.versions("torch", "ray")}
    print(result_line.line(result_line.result("shared_passes", "cpu", versions, rows)))


if __name__ == "__main__":
    main()
