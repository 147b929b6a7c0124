"""What is left of one key's speed while another key attacks the server.

The polite key reads one stream after another, and beside them asks short questions about prompts of
`--words` words, one at a time. The hostile key, a process of its own, does one thing after the
other, each for `--seconds`: floods of short requests, requests whose clients leave, echoes with
log-probabilities, long texts, many choices (`n`), and stored documents. The rows have the polite
key's time to first token and the pace of its streams, beside each attack and alone, right before
and right after it: the machine may have become slower meanwhile.

The same is also counted in seconds of the server's processor time: on one core, and with always
something to do, it passes as fast as the clock, but for what other programs take of the core. So on
a busy machine these figures say more.

    python benchmarks/robustness/two_keys.py --seconds 30 --server-core 0 --client-core 1
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness.load_server import LoadServer, numbers_of
from benchmarks.robustness.soak_report import percentile
from gemserve_client.load_test import result_line
from gemserve_client.load_test.text_table import aligned, cell

MODEL = "served"
POLITE, HOSTILE = "bob", "alice"
COMPLETIONS, DOCUMENTS = "/v1/completions", "/v1/documents"
GOAL_TTFT, GOAL_PACE = 3.0, 2.0  # how many times slower than alone the polite key may be
STREAM_TOKENS = 300
PROBE_PAUSE_S = 0.3
SETTLE_S = 3.0  # of an attack, before anything is measured
QUIET_S = 600.0  # most time until the server has nothing to do
REQUEST_S = 300.0  # most time of a request
REFUSED_S = 0.05  # how long an attacker waits after a refusal
WORDS = [
    "river",
    "stone",
    "cloud",
    "garden",
    "letter",
    "window",
    "bridge",
    "market",
    "silver",
    "winter",
    "lamp",
    "forest",
]


def words(rng: Random, count: int) -> str:
    """A text that no other request has sent."""
    return " ".join(f"{rng.choice(WORDS)}{rng.randrange(100)}" for _ in range(count))


@dataclass(slots=True)
class Polite:
    """What the polite key has seen."""

    ttfts_s: list[float] = field(default_factory=list)
    processor_ttfts_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    streaming_s: float = 0.0
    processor_s: float = 0.0  # of the server, while a stream was read
    gaps_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def joined(self, other: Polite) -> Polite:
        """What both have seen."""
        return Polite(
            self.ttfts_s + other.ttfts_s,
            self.processor_ttfts_s + other.processor_ttfts_s,
            self.num_tokens + other.num_tokens,
            self.streaming_s + other.streaming_s,
            self.processor_s + other.processor_s,
            self.gaps_s + other.gaps_s,
            self.failures + other.failures,
        )

    def figures(self) -> dict[str, Any]:
        pace = self.num_tokens / self.streaming_s if self.streaming_s else None
        processor_pace = self.num_tokens / self.processor_s if self.processor_s else None
        return {
            "probes": len(self.ttfts_s),
            **{f"ttft_p{p}_s": percentile(self.ttfts_s, p) for p in (50, 99)},
            "tokens_per_s": pace,
            "processor_ttft_p99_s": percentile(self.processor_ttfts_s, 99),
            "tokens_per_processor_s": processor_pace,
            "gap_p99_s": percentile(self.gaps_s, 99),
            "failed": dict(self.failures),
        }


async def texts(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    """The parts of a streamed completion."""
    # drawn at random, tokens after a stream's end have no text for as long as chance wants
    sent = {"model": MODEL, "stream": True, "ignore_eos": True, "temperature": 0, **body}
    async with http.stream("POST", COMPLETIONS, json=sent) as reply:
        if reply.status_code != 200:
            await reply.aread()
            raise RuntimeError(f"status {reply.status_code}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if text := choices[0].get("text"):
                    yield text


async def watch(server: LoadServer, seconds: float, num_words: int, seed: int) -> Polite:
    """Be the polite key for `seconds`. What is under way at the end does not count."""
    seen, rng = Polite(), Random(seed)

    async def stream(http: httpx.AsyncClient) -> None:
        before_s: float | None = None
        processor_before_s = 0.0
        body = {"prompt": words(rng, 5), "max_tokens": STREAM_TOKENS}
        async with aclosing(texts(http, body)) as parts:
            async for _ in parts:
                now_s, processor_now_s = time.perf_counter(), server.processor_s()
                if before_s is not None:
                    seen.num_tokens += 1
                    seen.gaps_s.append(now_s - before_s)
                    seen.streaming_s += now_s - before_s
                    seen.processor_s += processor_now_s - processor_before_s
                before_s, processor_before_s = now_s, processor_now_s

    async def probe(http: httpx.AsyncClient) -> None:
        began_s, processor_began_s = time.perf_counter(), server.processor_s()
        body = {"prompt": words(rng, num_words), "max_tokens": 4}
        async with aclosing(texts(http, body)) as parts:
            async for _ in parts:
                seen.ttfts_s.append(time.perf_counter() - began_s)
                seen.processor_ttfts_s.append(server.processor_s() - processor_began_s)
                break
        await asyncio.sleep(PROBE_PAUSE_S)

    async def again(act: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        async with client(server.url, server.keys[POLITE]) as http:
            while True:
                try:
                    await act(http)
                except (httpx.HTTPError, RuntimeError) as error:
                    seen.failures[f"{act.__name__}: {error}"[:80]] += 1
                    await asyncio.sleep(REFUSED_S)

    tasks = [asyncio.create_task(again(act)) for act in (stream, probe)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return seen


def client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    # without certificates, which take longer to load than a request takes
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=REQUEST_S, limits=limits, verify=False
    )


class Attacker:
    """The hostile key. Each attack is one request, or some that belong together."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http, self._rng = http, Random(seed)
        self.statuses: Counter[str] = Counter()

    async def flood(self) -> None:
        await self._complete(prompt=words(self._rng, 150), max_tokens=48)

    async def leavers(self) -> None:
        body = {"model": MODEL, "prompt": words(self._rng, 1500), "max_tokens": 500}
        try:
            async with asyncio.timeout(self._rng.uniform(0.05, 0.6)):
                async with self._http.stream("POST", COMPLETIONS, json=body) as reply:
                    self.statuses[str(reply.status_code)] += 1
                    await reply.aread()
        except TimeoutError:
            self.statuses["left"] += 1

    async def echoes(self) -> None:
        prompt = words(self._rng, 600)
        await self._complete(prompt=prompt, max_tokens=1, echo=True, logprobs=20)

    async def long_texts(self) -> None:
        await self._complete(prompt=words(self._rng, 20_000), max_tokens=16)
        await self._post("/tokenize", model=MODEL, prompt=words(self._rng, 60_000))

    async def choices(self) -> None:
        await self._complete(prompt=words(self._rng, 20), max_tokens=400, n=4)

    async def documents(self) -> None:
        made = await self._post(DOCUMENTS, text=words(self._rng, 4000), ttl=600)
        if made is None:
            return
        part = {"type": "file", "file": {"file_id": made["id"]}}
        content = [part, {"type": "text", "text": "What is this about?"}]
        messages = [{"role": "user", "content": content}]
        await self._post("/v1/chat/completions", messages=messages, max_tokens=16, model=MODEL)
        await self._http.delete(f"{DOCUMENTS}/{made['id']}")

    async def _complete(self, **fields: Any) -> None:
        await self._post(COMPLETIONS, model=MODEL, ignore_eos=True, **fields)

    async def _post(self, path: str, **fields: Any) -> dict[str, Any] | None:
        reply = await self._http.post(path, json=fields)
        self.statuses[str(reply.status_code)] += 1
        if reply.status_code != 200:
            await asyncio.sleep(REFUSED_S)
            return None
        # a reply's text is of interest where its id is needed, and large where it is not
        return dict(reply.json()) if path == DOCUMENTS else {}


# how many at once
ATTACKS = {"flood": 64, "leavers": 24, "echoes": 8, "long_texts": 6, "choices": 24, "documents": 8}


async def attack(name: str, url: str, key: str, seconds: float, seed: int) -> Counter[str]:
    """Be the hostile key for `seconds`."""
    async with client(url, key) as http:
        attacker = Attacker(http, seed)
        act = getattr(attacker, name)

        async def again() -> None:
            while True:
                try:
                    await act()
                except httpx.HTTPError as error:
                    attacker.statuses[type(error).__name__] += 1
                    await asyncio.sleep(REFUSED_S)

        tasks = [asyncio.create_task(again()) for _ in range(ATTACKS[name])]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return attacker.statuses


async def wait_until_quiet(url: str) -> None:
    """Wait until the server has nothing to do. Raises `RuntimeError` if it takes too long."""
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        ends_s = time.monotonic() + QUIET_S
        while time.monotonic() < ends_s:
            metrics = numbers_of((await http.get("/metrics")).text)
            names = ("gemserve_num_requests_running", "gemserve_num_requests_waiting")
            if not any(metrics[name] for name in names):
                return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"the server is still busy {QUIET_S:g} s after an attack")


def measure(server: LoadServer, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each attack, with the polite key's figures alone, before and after it."""
    rows: list[dict[str, Any]] = []
    # a prompt that comes twice is cached, and would cost the polite key nothing
    seeds = itertools.count(options.seed)

    def observe(seconds: float) -> Polite:
        return asyncio.run(watch(server, seconds, options.words, next(seeds)))

    observe(SETTLE_S)
    alone_s = options.seconds / 2 if options.alone_seconds is None else options.alone_seconds
    before = observe(alone_s)
    for name in options.attacks:
        print(f"beside {name}", file=sys.stderr)
        words_of = [sys.executable, __file__, "--as-attacker", name, "--url", server.url]
        words_of += ["--seconds", str(options.seconds + SETTLE_S), "--seed", str(next(seeds))]
        environment = {**os.environ, "TWO_KEYS_KEY": server.keys[HOSTILE]}
        with subprocess.Popen(
            words_of, env=environment, stdout=subprocess.PIPE, text=True
        ) as other:
            time.sleep(SETTLE_S)
            beside = observe(options.seconds)
            said, _ = other.communicate(timeout=REQUEST_S)
        row = {"beside": name, **beside.figures(), "attacker": json.loads(said)}
        row["rss_bytes"] = server.resident_bytes()
        asyncio.run(wait_until_quiet(server.url))
        after = observe(alone_s)
        rows.append({**row, "alone": before.joined(after).figures()})
        print(json.dumps(rows[-1]), file=sys.stderr)
        before = after
    return rows


def judge(rows: list[dict[str, Any]]) -> bool:
    """Add to each row how many times slower it is than alone. Is everything within the goals?"""
    is_good = True
    for row in rows:
        alone = row["alone"]
        row["alone_ttft_p99_s"], row["alone_tokens_per_s"] = (
            alone["ttft_p99_s"],
            alone["tokens_per_s"],
        )
        row["ttft_times"] = row["ttft_p99_s"] / alone["ttft_p99_s"] if row["ttft_p99_s"] else None
        pace = row["tokens_per_s"]
        row["pace_times"] = alone["tokens_per_s"] / pace if pace else None
        if pace and row["ttft_p99_s"]:
            name = "tokens_per_processor_s"
            row["processor_pace_times"] = alone[name] / row[name]
            name = "processor_ttft_p99_s"
            row["processor_ttft_times"] = row[name] / alone[name]
        is_near = (row["ttft_times"] or 1e9) <= GOAL_TTFT and (
            row["pace_times"] or 1e9
        ) <= GOAL_PACE
        is_good = is_good and is_near and not row["failed"]
    return is_good


def main() -> int:
    """Return 0 if the polite key was as fast as it should be, and never refused."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each attack (%(default)s)")
    parser.add_argument("--alone-seconds", type=float, help="after each (half of --seconds)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--words", type=int, default=300, help="of a question (%(default)s)")
    parser.add_argument("--kv-memory", default="768MiB")
    parser.add_argument("--settings", default="", help="more options of the server, as one text")
    parser.add_argument("--server-core", type=int, help="bind the server to this processor core")
    parser.add_argument("--client-core", type=int, help="bind both clients to this core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-attacker", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_attacker:
        key = os.environ["TWO_KEYS_KEY"]
        told = attack(options.as_attacker, options.url, key, options.seconds, options.seed)
        print(json.dumps(asyncio.run(told)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        settings = ["--kv-memory", options.kv_memory, "--served-model-name", MODEL]
        settings += options.settings.split()
        server = LoadServer(
            Path(name), model=options.model, core=options.server_core, settings=settings
        )
        with server:
            if options.client_core is not None:
                os.sched_setaffinity(0, {options.client_core})
            rows = measure(server, options)
            errors = server.errors_in_log()[:20]
    is_good = judge(rows) and not errors
    result = {"benchmark": "two_keys", "commit": result_line.commit(), "rows": rows}
    columns = ("beside", "probes", "ttft_p50_s", "ttft_p99_s", "alone_ttft_p99_s", "ttft_times")
    columns += ("tokens_per_s", "alone_tokens_per_s", "pace_times", "gap_p99_s")
    columns += ("processor_ttft_times", "processor_pace_times")
    print(aligned([columns, *([cell(row.get(name)) for name in columns] for row in rows)]))
    print(json.dumps({**result, "log_errors": errors, "seconds": options.seconds}))
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
