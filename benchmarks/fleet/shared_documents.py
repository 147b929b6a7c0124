"""What does the router find in the caches of two replicas, compared with a hash and with chance?

The built-in model, two replicas on Ray Serve with one thread each, and 20 documents that are asked
about again and again; then the same with one document that half of the questions are about. A hash
sends a document to the same replica for ever; chance to any. Each rule has replicas of its own, and
the same questions in the same order.

    python benchmarks/fleet/shared_documents.py
    python benchmarks/fleet/shared_documents.py --questions 30 --hot 0

The caches of both replicas together hold all documents, one alone does not. The last line of the
output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.replicas import replica_choice
from gemserve.replicas.cluster import deploy, local_cluster, prepare_environment
from gemserve.replicas.replica_choice import OrderReplicas, RoutingHints
from gemserve.replicas.routing import ReplicaState
from gemserve_client.load_test import result_line

NUM_DOCUMENTS = 20
NUM_LINES = 300  # of a document: 10 KB, about 6,800 tokens of this model
MEMORY = 1536 << 20  # half of it for the cache: about 14 documents of a replica
PATH = "/v1/chat/completions"


def by_hash(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    """By the first chunk, which is the same for all questions about a document."""
    names = sorted(state.name for state in states)
    if not hints.chunks:
        return names
    first = hints.chunks[0].key[0] % len(names)
    return names[first:] + names[:first]


def by_chance(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    names = [state.name for state in states]
    return RANDOM.sample(names, len(names))


RANDOM = Random(0)
RULES: dict[str, OrderReplicas] = {
    "router": replica_choice.by_cost,
    "hash": by_hash,
    "random": by_chance,
}


def document(number: int) -> str:
    numbers = Random(number)
    lines = (f"Line {n} of {number} is at {numbers.getrandbits(30)}." for n in range(NUM_LINES))
    return "\n".join(lines)


def questions(count: int, hot: float) -> list[tuple[int, int]]:
    """Which document each is about. `hot`: the share of the first one."""
    numbers = Random(1)
    return [
        (0 if numbers.random() < hot else numbers.randrange(NUM_DOCUMENTS), number)
        for number in range(count)
    ]


async def ask(client: httpx.AsyncClient, about: int, number: int) -> dict[str, float]:
    body = {
        "model": "builtin",
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"{document(about)}\nWhere is line {number}?"}],
    }
    begin_s, first_s, usage = time.monotonic(), 0.0, dict[str, Any]()
    async with client.stream("POST", PATH, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            said = event["choices"] and event["choices"][0]["delta"].get("content")
            first_s = first_s or (time.monotonic() - begin_s if said else 0.0)
            usage = event.get("usage") or usage
    return {
        "ttft_s": first_s or time.monotonic() - begin_s,
        "tokens": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def run_load(client: httpx.AsyncClient, asked: list[tuple[int, int]], streams: int) -> Any:
    """`streams` clients ask in turn. Caches are cold at first, which counts."""
    waiting, done = list(reversed(asked)), list[dict[str, float]]()

    async def one_client() -> None:
        while waiting:
            done.append(await ask(client, *waiting.pop()))

    await asyncio.gather(*(one_client() for _ in range(streams)))
    times = sorted(each["ttft_s"] for each in done)
    return {
        "hit_rate": round(sum(d["cached"] for d in done) / sum(d["tokens"] for d in done), 3),
        "ttft_p50_s": round(statistics.median(times), 3),
        "ttft_p95_s": round(times[int(0.95 * (len(times) - 1))], 3),
        "questions": len(done),
    }


async def run_rule(name: str, asked: list[tuple[int, int]], streams: int) -> Any:
    """Start an ingress over the replicas that are deployed, and ask it."""
    from gemserve.replicas.ingress import create_ingress
    from gemserve.replicas.ingress_metrics import IngressMetrics
    from gemserve.replicas.ray_replicas import RayReplicas
    from gemserve.replicas.replica import ReplicaSettings
    from gemserve.replicas.router_link import ROUTER_LINK

    ROUTER_LINK.rule = RULES[name]
    settings = ReplicaSettings(
        num_threads=1,
        model=ModelConfig(model="builtin", device="cpu"),
        engine=EngineConfig(kv_memory_bytes=MEMORY, filter_method="none"),
        server=ServerConfig(allowed_hosts=("*",)),
    )
    replicas = RayReplicas(deploy(settings, 2, False))
    for _ in range(600):
        if len(replicas.names()) == 2:
            break
        await asyncio.sleep(0.2)
    app = create_ingress(replicas, settings.server, IngressMetrics(lambda: 2, lambda: 2))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=120
    ) as client:
        await asyncio.sleep(3.0)  # until both have reported
        return await run_load(client, asked, streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--rules", default="router,hash,random")
    parser.add_argument("--hot", type=float, nargs="+", default=[0.0, 0.5])
    arguments = parser.parse_args()
    prepare_environment(os.environ)
    rows = []
    for hot in arguments.hot:
        for name in arguments.rules.split(","):
            with local_cluster(2, 0):
                asked = questions(arguments.questions, hot)
                found = asyncio.run(run_rule(name, asked, arguments.streams))
            rows.append({"rule": name, "hot": hot, **found})
            print(rows[-1], flush=True)
    print(json.dumps(result_line.result("shared_documents", "cpu", {"model": "builtin"}, rows)))


if __name__ == "__main__":
    main()
