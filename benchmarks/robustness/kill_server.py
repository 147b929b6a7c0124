"""Is every start clean after `kill -9`, and are its answers right?

    python benchmarks/robustness/kill_server.py --kills 50

A server is killed at random moments while it streams, writes documents to disk, and loads adapters
and documents over HTTP; every fifth time while it starts. The next one has the same folders. Its
log must have no error and no warning but named ones, and its answers must equal those that were
recorded before the first kill, or by the server that was killed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness.load_server import write_random_adapter
from benchmarks.shared.server_process import ServeProcess
from gemserve.config import ModelConfig
from gemserve.model.loading.loader import load
from gemserve_client.load_test.traffic import COMMON_WORDS

READY_S = 300.0
LONGEST_LOAD_S = 60.0
LONGEST_MOMENT_S = 0.6
SETTINGS = [
    *("--log-format", "json", "--otel", "off", "--adapter", "first=a"),
    *("--served-model-name", "served", "--filter-min-tokens", "256"),
]
# A file that was cut off by the kill would be removed with this warning. None has ever been: files
# get their names when they are complete.
NAMED_WARNINGS = re.compile(r"document cache: .* is removed: ")
Body = dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What happened over all kills."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Server(ServeProcess):
    """One process, on a free port."""

    def __init__(self, folder: Path, log: Path, settings: list[str]) -> None:
        folders = ["--cache-dir", str(folder / "cache"), "--adapter-dir", str(folder / "adapters")]
        plain = {k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")}
        super().__init__([*SETTINGS, *settings, *folders], log, plain)

    def complaints(self) -> list[str]:
        """What its log has that a clean start has not."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                level, message = entry["level"], entry["message"]
            except (ValueError, KeyError, TypeError):
                found.append(line)
                continue
            if level not in ("debug", "info") and not NAMED_WARNINGS.search(message):
                found.append(f"{level}: {message}")
        return found


def document(rng: Random, num_words: int) -> tuple[str, str]:
    """A text with a fact in it, and the fact."""
    words = rng.choices(COMMON_WORDS.split(), k=num_words)
    code, place = "".join(rng.choices("0123456789", k=5)), rng.randrange(num_words)
    text = f"{' '.join(words[:place])}. The code for the lantern is {code}. "
    return text + " ".join(words[place:]) + ".", code


def body_of(text: str, **more: Any) -> Body:
    content = f"{text}\n\nWhat is the code for the lantern?"
    return {
        "model": "served",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
        **more,
    }


def ask(url: str, body: Body) -> tuple[str, int]:
    """The answer, and how many tokens of the document the cache had."""
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    reply.raise_for_status()
    content = reply.json()
    return content["choices"][0]["message"]["content"], content["filter"]["cached_tokens"]


class Load:
    """Requests of all kinds, until the server is killed. `answers`: of those that were complete."""

    def __init__(self, url: str, rng: Random) -> None:
        self.url, self.rng = url, rng
        self.answers: list[tuple[Body, str]] = []
        self.counts: Counter[str] = Counter()

    async def run(self, kill: Any) -> None:
        """Kill the server a moment after some answers, whatever the machine's speed."""
        num_answers, seconds = self.rng.randrange(4), self.rng.uniform(0, LONGEST_MOMENT_S)
        ends_s = time.monotonic() + LONGEST_LOAD_S
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            works = [self._stream, self._stream, self._load_adapters, self._store_documents]
            tasks = [asyncio.create_task(self._repeat(work, client)) for work in works]
            while len(self.answers) < num_answers and time.monotonic() < ends_s:
                await asyncio.sleep(0.005)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(kill)
            await asyncio.wait(tasks, timeout=30)
            for task in tasks:
                task.cancel()

    async def _repeat(self, work: Any, client: httpx.AsyncClient) -> None:
        try:
            while True:
                await work(client)
        except httpx.HTTPError:  # the server was killed
            self.counts[f"cut off: {work.__name__.strip('_')}"] += 1

    async def _stream(self, client: httpx.AsyncClient) -> None:
        body = body_of(document(self.rng, self.rng.randrange(300, 2500))[0])
        text = ""
        path = "/v1/chat/completions"
        async with client.stream("POST", path, json={**body, "stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        self.answers.append((body, text))
        self.counts["streams"] += 1

    async def _load_adapters(self, client: httpx.AsyncClient) -> None:
        for path in ("a", "b"):
            named = {"name": "second", "path": path}
            (await client.post("/v1/adapters", json=named)).raise_for_status()
            self.counts["adapters loaded"] += 1
        (await client.delete("/v1/adapters/second")).raise_for_status()

    async def _store_documents(self, client: httpx.AsyncClient) -> None:
        text = document(self.rng, self.rng.randrange(300, 1500))[0]
        reply = (await client.post("/v1/documents", json={"text": text})).raise_for_status()
        self.counts["documents stored"] += 1
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        (await client.delete(f"/v1/documents/{reply.json()['id']}")).raise_for_status()


def check(server: Server, expected: list[tuple[Body, str]], outcome: Outcome) -> None:
    """Compare answers with recorded ones, and look into the log."""
    for body, answer in expected:
        text, cached = ask(server.url, body)
        outcome.counts["answers"] += 1
        outcome.counts["answers with cached tokens"] += cached > 0
        if text != answer:
            outcome.faults.append(f"{text!r} instead of {answer!r}")
    adapters = httpx.get(f"{server.url}/v1/adapters", timeout=60).json()["data"]
    if [adapter["name"] for adapter in adapters] != ["first"]:
        outcome.faults.append(f"adapters: {adapters}")
    documents = httpx.get(f"{server.url}/v1/documents", timeout=60).json()["data"]
    if documents:
        outcome.faults.append(f"documents: {documents}")
    outcome.faults += [f"log: {line}" for line in server.complaints()]


def run(folder: Path, options: argparse.Namespace) -> Outcome:
    """At most `--kills`, and none after `--minutes`."""
    rng, outcome = Random(options.seed), Outcome()
    model = load(ModelConfig(model=options.model, device="cpu")).model
    for index, name in enumerate("ab"):
        write_random_adapter(folder / "adapters" / name, "prefix", model, index)
    del model
    settings = ["--model", options.model, "--kv-memory", options.kv_memory]
    settings += ["--cache-disk", options.cache_disk]
    recorded: list[tuple[Body, str]] = []
    new: list[tuple[Body, str]] = []  # of the server that was killed last
    ends_s = time.monotonic() + 60 * options.minutes
    for number in range(options.kills + 1):
        is_last = number == options.kills or time.monotonic() > ends_s
        server = Server(folder, folder / f"server-{number}.log", settings)
        try:
            if number % 5 == 4 and not is_last:
                time.sleep(rng.uniform(0, 6))
                outcome.counts["killed while starting"] += 1
                continue
            states = server.wait_until_ready(READY_S, pause_s=0.05)
            outcome.counts.update(f"ready: {said}" for said in states)
            if not recorded:
                bodies = [body_of(document(rng, 1500)[0], **more) for more in _VARIANTS]
                recorded = [(body, ask(server.url, body)[0]) for body in bodies]
            check(server, [*rng.sample(recorded, 2), *new[-2:]], outcome)
            if is_last:
                break
            requests = Load(server.url, rng)
            asyncio.run(requests.run(server.kill))
            outcome.counts.update(requests.counts)
            assert server.process.returncode == -signal.SIGKILL
            outcome.counts["killed while serving"] += 1
            cut = list((folder / "cache").glob("kv-*.tmp"))
            outcome.counts["killed amid a cache write"] += bool(cut)
            new = requests.answers
        finally:
            server.kill()
        print(f"kill {number + 1}: {dict(outcome.counts)}", file=sys.stderr, flush=True)
    left = list((folder / "cache").glob("*.tmp"))
    outcome.faults += [f"left behind: {path}" for path in left]
    return outcome


_VARIANTS: list[Body] = [{}, {"adapter": "first"}, {"logprobs": True}, {"filter": {"keep": 128}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--cache-disk", default="100MB")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=240.0, help="no kill after so long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), arguments)
    for fault in outcome.faults:
        print(fault, file=sys.stderr)
    result = {"seed": arguments.seed, "faults": len(outcome.faults)}
    print(json.dumps({**result, **outcome.counts}))
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
