"""A long mixed load on a real server: are all answers right, and is nothing left behind?

The server runs in a process of its own, with keys of two tenants, adapters, and a document cache on
disk. First every request of the mix is sent alone, twice, and its answer is kept. Then the mix is
sent as fast as the server answers, which measures its capacity. The soak sends it at `--load` times
that rate, at random times: streams, clients that cancel, leave or read slowly, mistakes, adapters,
one of them being replaced, cached and stored documents, windows, libraries, agents' requests,
schemas, tools, and prompts of 32,000 tokens. Every answer is compared with the one that was kept.

At the end, when nothing runs, memory, file descriptors, threads and tasks are compared with what
there was before.

    python benchmarks/robustness/soak.py --minutes 60 --server-core 0 --client-core 1 --out soak
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness import soak_report
from benchmarks.robustness.load_server import TENANTS, LoadServer, Sample, write_adapters
from benchmarks.robustness.mix import LIBRARY, Mix
from benchmarks.robustness.mixed_client import Call, MixedClient
from benchmarks.robustness.open_loop import Run, Sender, record

CONNECTIONS = 256
IDLE_S = 12.0  # threads of the server's pool end after 10 s without work, when the next work comes
SETTLE_S = 180.0
CALM_CPU_S = 0.2  # in a second
CAPACITY_AT_ONCE, FILLING = 16, 200  # requests at once


def main() -> int:
    """Return 0 if all answers were right and nothing was left behind."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = write_adapters(folder / "adapters", arguments.model)
        options += ["--cache-dir", str(folder / "cache"), "--cache-disk", arguments.cache_disk]
        options += ["--kv-memory", arguments.kv_memory, "--library-dir", str(folder / "libraries")]
        options += arguments.settings.split()
        mix = Mix(
            arguments.model,
            tokenizer_of(arguments.model),
            arguments.seed,
            scale=arguments.scale,
        )
        print("starting the server", file=sys.stderr)
        with LoadServer(
            folder, model=arguments.model, core=arguments.server_core, settings=options
        ) as server:
            if arguments.client_core is not None:
                os.sched_setaffinity(0, {arguments.client_core})
            report = asyncio.run(_soak(server, mix, arguments))
            report["log_errors"] = server.errors_in_log()[:20]
            if arguments.out is not None:
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / "server.log").write_bytes(server.log.read_bytes())
    report = soak_report.finish(report, vars(arguments))
    if arguments.out is not None:
        (arguments.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
        (arguments.out / "soak.md").write_text(soak_report.as_markdown(report))
    print(soak_report.as_markdown(report))
    report.pop("samples")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of texts")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak (%(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--rate", type=float, help="requests a second, in place of --load")
    parser.add_argument("--capacity-seconds", type=float, default=180.0)
    parser.add_argument("--warm-minutes", type=float, default=2.0, help="of load before the soak")
    parser.add_argument("--kv-memory", default="768MiB")
    parser.add_argument("--cache-disk", default="256MiB")
    parser.add_argument("--server-core", type=int, help="bind the server to this processor core")
    parser.add_argument("--client-core", type=int, help="bind this script to this core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default="", help="more options of the server, as one text")
    parser.add_argument("--out", type=Path, help="folder for soak.json, soak.md and the log")
    return parser.parse_args()


def tokenizer_of(model: str) -> Any:
    """What counts the tokens of texts."""
    from gemserve.config import ModelConfig
    from gemserve.model.loading.checkpoint import open_checkpoint

    return open_checkpoint(ModelConfig(model=model)).load_tokenizer()


async def _soak(server: LoadServer, mix: Mix, arguments: argparse.Namespace) -> dict[str, Any]:
    client = MixedClient(server, connections=CONNECTIONS)
    sender = Sender(client, most_open=CONNECTIONS)
    async with httpx.AsyncClient() as watcher:
        print("adding libraries", file=sys.stderr)
        for tenant in TENANTS:
            for path, facts in mix.files.items():
                await client.add_file(tenant, LIBRARY, {"path": path, "text": facts.text})
        print("recording answers", file=sys.stderr)
        recorded = await record(client, mix)
        rate, capacity = arguments.rate, None
        if rate is None:
            print("measuring the capacity", file=sys.stderr)
            capacity = await measure_capacity(
                sender, server, watcher, mix, arguments.capacity_seconds, arguments.seed
            )
            rate = arguments.load * capacity["requests_per_s"]
        # the operating system gives pages of the KV pool when they are first used: use them all
        await sender.closed_loop(
            lambda rng: rng.choice(mix.calls["chat"]), at_once=FILLING, seconds=20, seed=0
        )
        print(f"warming up at {rate:.2f} requests a second", file=sys.stderr)
        seed = arguments.seed + 1
        seconds = arguments.warm_minutes * 60
        warm = await sender.open_loop(mix.draw, rate=rate, seconds=seconds, seed=seed)
        before = await _settled(client, server, watcher, mix)
        print(f"soaking for {arguments.minutes:g} minutes", file=sys.stderr)
        seconds, seed = arguments.minutes * 60, arguments.seed + 2
        async with _sampling(server, watcher, min(60.0, seconds / 20)) as samples:
            run = await sender.open_loop(mix.draw, rate=rate, seconds=seconds, seed=seed)
        after = await _settled(client, server, watcher, mix)
        await client.close()
        await asyncio.sleep(1)
        closed = await server.sample(watcher)
    return {
        "recorded": recorded,
        "capacity": capacity,
        "rate": rate,
        "warm_up": _summary(warm),
        "soak": _summary(run) | {"cpu_share": (after.cpu_s - before.cpu_s) / run.seconds},
        "before": before.row(),
        "after": after.row(),
        "closed": closed.row(),
        "samples": [sample.row() for sample in samples],
    }


async def measure_capacity(
    sender: Sender,
    server: LoadServer,
    watcher: httpx.AsyncClient,
    mix: Mix,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Requests a second while `CAPACITY_AT_ONCE` clients send the mix one after the other.

    Clients that read slowly are left out: they would wait, and not the server.
    """

    def pick(rng: Random) -> Call:
        while (call := mix.draw(rng)).manner == "slow":
            pass
        return call

    before = await server.sample(watcher)
    run = await sender.closed_loop(pick, at_once=CAPACITY_AT_ONCE, seconds=seconds, seed=seed)
    after = await server.sample(watcher)
    return {
        **_summary(run),
        "requests_per_s": run.count("right") / run.seconds,
        "cpu_share": (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s),
    }


@asynccontextmanager
async def _sampling(
    server: LoadServer, watcher: httpx.AsyncClient, every_s: float
) -> AsyncIterator[list[Sample]]:
    """Sample the server at regular times until the context ends."""
    samples: list[Sample] = []

    async def watch() -> None:
        while True:
            samples.append(await server.sample(watcher))
            await asyncio.sleep(every_s)

    task = asyncio.create_task(watch())
    try:
        yield samples
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _settled(
    client: MixedClient, server: LoadServer, watcher: httpx.AsyncClient, mix: Mix
) -> Sample:
    """What the server holds when nothing has run for a while."""
    short = mix.calls["error"][0]
    cpu_s = 0.0
    for _ in range(int(SETTLE_S)):
        sample = await server.sample(watcher)
        used_s, cpu_s = sample.cpu_s - cpu_s, sample.cpu_s
        # it reads documents while nobody asks, which holds memory
        if not sample.running and not sample.waiting and used_s < CALM_CPU_S:
            break
        await asyncio.sleep(1)
    for _ in range(2):
        await asyncio.sleep(IDLE_S)
        await client.send(short, 0.0)
    await client.drop_connections()
    await asyncio.sleep(IDLE_S)
    return await server.sample(watcher)


def _summary(run: Run) -> dict[str, Any]:
    """A run in figures: by kind and verdict, and what was not right."""
    kinds: dict[str, Counter[str]] = {}
    for outcome in run.outcomes:
        kinds.setdefault(outcome.name.split("/")[0], Counter())[outcome.verdict] += 1
    bad = [outcome for outcome in run.outcomes if outcome.verdict != "right"]
    return {
        "requests": len(run.outcomes),
        "verdicts": dict(Counter(outcome.verdict for outcome in run.outcomes)),
        "kinds": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "seconds": run.seconds,
        "held_back": run.held_back,
        "most_open": run.most_open,
        "pauses_s": run.pauses_s,
        "latency": soak_report.latencies(run.outcomes),
        "bad": [
            {"name": o.name, "due_s": o.due_s, "verdict": o.verdict, "detail": o.detail}
            for o in bad[:50]
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
