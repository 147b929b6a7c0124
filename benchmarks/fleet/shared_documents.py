"""What does the router find in two replicas' caches, beside Ray's hash and chance, and is the
simulated fleet right about it?

SmolLM2, two replicas on Ray Serve with one thread each, and questions about 20 documents of prose,
each of which fills several windows; then the same with one document that half of the questions are
about. The caches of both replicas together hold all documents, one alone does not. Questions
arrive by a Poisson process. Each rule of routing has replicas of its own, and the same questions at
the same times. Beside each row stands what `gemserve_fleet.simulator.simulation` says of the same
load, from the seconds that single questions took on the same replicas just before.

    python benchmarks/fleet/shared_documents.py
    python benchmarks/fleet/shared_documents.py --questions 30 --hot 0 --rules router,random

`hash` is Ray's ring of consistent hashes with each document as a session. The first quarter of the
questions, which fills the caches, is sent and not counted. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx
import numpy as np
import uvicorn

from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.cost import ModelShape
from gemserve.synthetic.prose import topics_sentences
from gemserve_client.load_test import result_line
from gemserve_fleet.replicas import replica_choice
from gemserve_fleet.replicas.cluster import deploy, local_cluster, prepare_environment
from gemserve_fleet.replicas.replica_choice import OrderReplicas, RoutingHints
from gemserve_fleet.replicas.routing import ReplicaState
from gemserve_fleet.simulator.load import Arrival
from gemserve_fleet.simulator.replica import ReplicaMemory
from gemserve_fleet.simulator.request_cost import RequestCost
from gemserve_fleet.simulator.simulation import REPORT_S, WARM_UP, Outcome, simulate

NUM_DOCUMENTS = 20
DOCUMENT_CHARS = 20_000  # about 4,300 tokens
CACHED_DOCUMENTS = 14  # that one replica's cache holds
MAX_TOKENS = 16
PATH = "/v1/chat/completions"
POLICIES = {"router": "router", "hash": "consistent hash", "random": "random"}
_RANDOM = Random(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One answer, in seconds since the load began. `segments`, `cached`: of its document.

    One that the cache has whole, because it is asked about so often, counts as one cached segment.
    """

    sent_s: float
    first_s: float
    end_s: float
    segments: int
    cached: int
    kept_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the simulation must know of the model that the replicas have."""

    shape: ModelShape
    layer: int


def by_ring(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    """As Ray's `ConsistentHashRouter` does it, where the first chunk names the session."""
    from ray.serve.experimental import consistent_hash_router as ray_ring

    names = [state.name for state in states]
    if not hints.chunks:
        return names
    ring = sorted(
        (ray_ring._hash_bytes(f"{name}:{number}".encode()), name)
        for name in names
        for number in range(ray_ring.DEFAULT_NUM_VIRTUAL_NODES)
    )
    place = bisect_right([key for key, _ in ring], ray_ring._hash_bytes(hints.chunks[0].key))
    return list(dict.fromkeys(name for _, name in ring[place:] + ring[:place]))


def by_chance(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    names = [state.name for state in states]
    return _RANDOM.sample(names, len(names))


def in_turn(hints: RoutingHints, states: Sequence[ReplicaState]) -> list[str]:
    names = sorted(state.name for state in states)
    first = hints.number % len(names)
    return names[first:] + names[:first]


RULES: Mapping[str, OrderReplicas] = {
    "router": replica_choice.by_cost,
    "hash": by_ring,
    "random": by_chance,
}


def document(number: int) -> str:
    """Sentences of Python's language reference, in an order of this document's own, and a fact."""
    sentences, numbers = topics_sentences(), Random(number)
    parts = [f"Notes, part {number}."]
    while sum(map(len, parts)) < DOCUMENT_CHARS:
        parts.append(numbers.choice(sentences))
    parts.insert(numbers.randrange(len(parts)), f"The keeper of part {number} is Agnes Holloway.")
    return " ".join(parts)


def question(about: int, number: int) -> str:
    """Worded anew each time, so that nothing of an answer is found again."""
    return f"Question {number}: who is the keeper of part {about}?"


def questions(count: int, hot: float, rate: float) -> list[Arrival]:
    """When each comes, and which document it is about. `hot`: the share of the first one."""
    numbers = np.random.default_rng(1)
    times = np.cumsum(numbers.exponential(1 / rate, count))
    about = numbers.integers(0, NUM_DOCUMENTS, count)
    about[numbers.random(count) < hot] = 0
    return [Arrival(float(at), int(number)) for at, number in zip(times, about, strict=True)]


async def ask(client: httpx.AsyncClient, text: str, asked: str) -> Timed:
    body = {
        "model": "smollm2",
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"{text}\n\n{asked}"}],
    }
    sent_s, first_s, usage, report = time.monotonic(), 0.0, dict[str, Any](), dict[str, Any]()
    async with client.stream("POST", PATH, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            report = event.get("filter") or report
            said = event["choices"] and event["choices"][0]["delta"].get("content")
            first_s = first_s or (time.monotonic() if said else 0.0)
            usage = event.get("usage") or usage
    return Timed(
        sent_s=sent_s,
        first_s=first_s or time.monotonic(),
        end_s=time.monotonic(),
        segments=report["windows"] or 1,
        cached=1 if report["windows"] is None else report["cached_windows"],
        kept_tokens=report["kept_tokens"],
        prompt_tokens=usage["prompt_tokens"],
    )


async def measure_cost(client: httpx.AsyncClient, facts: ModelFacts, rounds: int) -> RequestCost:
    """What single questions cost, while both replicas have one each.

    A part of a document, of fewer segments, tells what a cached segment costs from the rest.
    """
    timed: dict[str, list[Timed]] = {"cold": [], "hit": [], "part": []}
    for first in range(1000, 1000 + 2 * rounds, 2):
        whole = {number: document(number) for number in (first, first + 1)}
        part = {number: text[: len(text) * 3 // 5] for number, text in whole.items()}
        for name, texts in (("cold", whole), ("hit", whole), ("", part), ("part", part)):
            asking = (ask(client, text, question(n, n)) for n, text in texts.items())
            found = await asyncio.gather(*asking)
            if name:
                timed[name] += found
    if any(each.cached < each.segments for each in timed["hit"]):
        raise SystemExit(f"single questions were not found in the cache: {timed}")
    cold, hit = timed["cold"], timed["hit"]
    ttft = {k: statistics.mean(e.first_s - e.sent_s for e in each) for k, each in timed.items()}
    segments = {k: statistics.mean(e.segments for e in each) for k, each in timed.items()}
    num_pieces = round(segments["cold"])
    cached_s = (ttft["hit"] - ttft["part"]) / (segments["hit"] - segments["part"])
    cached_s = max(0.0, cached_s) * segments["cold"] / num_pieces
    rest_s = max(0.0, ttft["hit"] - num_pieces * cached_s)
    step_s = statistics.mean((e.end_s - e.first_s) / (MAX_TOKENS - 1) for e in cold + hit)
    piece_tokens = round(statistics.mean(e.prompt_tokens for e in cold) / num_pieces)
    kept_tokens = round(statistics.mean(e.kept_tokens for e in cold))
    piece_bytes = facts.shape.filter_bytes(piece_tokens, facts.layer)
    return RequestCost(
        reading="windows",
        num_pieces=num_pieces,
        piece_tokens=piece_tokens,
        kept_tokens=kept_tokens,
        read_s=(ttft["cold"] - rest_s) / num_pieces,
        cached_s=cached_s,
        rest_s=rest_s,
        piece_bytes=piece_bytes,
        reading_bytes=num_pieces * piece_bytes,
        decoding_bytes=facts.shape.kept_bytes(kept_tokens + MAX_TOKENS),
        answer_tokens=MAX_TOKENS,
        step_s=step_s,
        sequence_s=0.0,
        products_s=0.0,
    )


async def run_load(client: httpx.AsyncClient, asked: Sequence[Arrival]) -> list[Timed]:
    """Send each question at its time, however many wait."""
    begin_s = time.monotonic()

    async def one(number: int, arrival: Arrival) -> Timed:
        await asyncio.sleep(max(0.0, begin_s + arrival.time_s - time.monotonic()))
        asked = question(arrival.document, number)
        return await ask(client, document(arrival.document), asked)

    return await asyncio.gather(*(one(number, each) for number, each in enumerate(asked)))


def figures(timed: Sequence[Timed]) -> dict[str, float]:
    """The same as `Outcome` has."""
    num_warm = int(WARM_UP * len(timed))
    counted = timed[num_warm:]
    start_s, stop_s = counted[0].sent_s, timed[-1].sent_s
    ends = [each.end_s for each in timed]
    ttft = [each.first_s - each.sent_s for each in counted]
    return {
        "hit_rate": statistics.mean(e.cached / e.segments for e in counted),
        "requests_per_s": sum(start_s < end <= stop_s for end in ends) / (stop_s - start_s),
        "ttft_mean_s": statistics.mean(ttft),
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p95_s": float(np.percentile(ttft, 95)),
        "all_s": max(ends) - timed[0].sent_s,
    }


def simulated(
    rule: str, cost: RequestCost, memory_bytes: int, asked: Sequence[Arrival], seeds: int = 5
) -> dict[str, float]:
    """Means over several seeds: a hash and chance have luck."""
    memory = ReplicaMemory(kv_bytes=memory_bytes, cache_bytes=memory_bytes // 2)
    outcomes: list[Outcome] = [
        simulate(cost, memory, asked, num_replicas=2, policy=POLICIES[rule], seed=seed)
        for seed in range(seeds)
    ]
    names = ("hit_rate", "requests_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s")
    return {name: statistics.mean(asdict(each)[name] for each in outcomes) for name in names}


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The application on a free port: httpx alone would give streams only when they have ended."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def run_rule(
    rule: str, facts: ModelFacts, memory_bytes: int, arguments: argparse.Namespace, hot: float
) -> dict[str, Any]:
    """Start an ingress over the replicas that are deployed, measure single questions, and ask."""
    from gemserve_fleet.replicas.ingress import create_ingress
    from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
    from gemserve_fleet.replicas.ray_replicas import RayReplicas
    from gemserve_fleet.replicas.replica import ReplicaSettings
    from gemserve_fleet.replicas.router_link import ROUTER_LINK

    settings = ReplicaSettings(
        num_threads=1,
        model=ModelConfig(model="smollm2", device="cpu"),
        engine=EngineConfig(kv_memory_bytes=memory_bytes),
        server=ServerConfig(allowed_hosts=("*",)),
    )
    replicas = RayReplicas(deploy(settings, 2, False))
    app = create_ingress(replicas, settings.server, IngressMetrics(lambda: 2))
    async with (
        listening(app) as address,
        httpx.AsyncClient(base_url=address, timeout=600) as client,
    ):
        while app.state.ingress.adapters.num_ready < 2:
            await app.state.ingress.adapters.ready()
            await asyncio.sleep(0.2)
        await asyncio.sleep(3 * REPORT_S)  # until both have reported
        ROUTER_LINK.rule = in_turn
        cost = await measure_cost(client, facts, arguments.rounds)
        ROUTER_LINK.rule = RULES[rule]
        mean_s = (cost.reading_s(0) + cost.reading_s(cost.num_pieces)) / 2
        rate = arguments.rate or arguments.load * 2 / mean_s
        arguments.rate = rate  # all rules get the same questions
        asked = questions(arguments.questions, hot, rate)
        timed = await run_load(client, asked)
    row = {"rule": rule, "hot": hot, "rate": rate, **figures(timed)}
    said = simulated(rule, cost, memory_bytes, asked)
    row |= {f"simulated_{name}": value for name, value in said.items()}
    row |= {"alone_s": cost.reading_s(0), "cached_s": cost.reading_s(cost.num_pieces)}
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--rules", default="router,hash,random")
    parser.add_argument("--hot", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--load", type=float, default=0.8, help="of both, if half is cached")
    parser.add_argument("--rate", type=float, help="questions per second, instead of --load")
    parser.add_argument("--rounds", type=int, default=2, help="of single questions before")
    arguments = parser.parse_args()
    prepare_environment(os.environ)
    core = build_calibrated_core(ModelConfig(model="smollm2", device="cpu"), EngineConfig())
    facts = ModelFacts(shape=core.model.shape, layer=core.config.filter_layer)
    del core
    document_bytes = facts.shape.filter_bytes(DOCUMENT_CHARS // 4, facts.layer)
    memory_bytes = 2 * CACHED_DOCUMENTS * document_bytes
    rows = []
    for hot in arguments.hot:
        for rule in arguments.rules.split(","):
            with local_cluster(2, 0):
                rows.append(asyncio.run(run_rule(rule, facts, memory_bytes, arguments, hot)))
            print(rows[-1], flush=True)
    print(json.dumps(result_line.result("shared_documents", "cpu", {"model": "smollm2"}, rows)))


if __name__ == "__main__":
    main()
