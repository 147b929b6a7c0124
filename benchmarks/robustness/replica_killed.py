"""What do the official clients see when one of two replicas is killed, and when the server drains?

    python benchmarks/robustness/replica_killed.py --anthropic .venv-clients/anthropic/bin/python

`gemserve serve --replicas 2` streams 50 answers of the built-in model at once, to OpenAI's client
for Python, to Anthropic's, and to `curl -N`. Three times: undisturbed; with `kill -9` of one
replica when all streams have begun; and with SIGTERM to the server. Completions have a seed each,
and messages are greedy, so every whole answer must be that of the undisturbed run; those while it
drains are shorter, and must be its beginning. The last line is JSON.
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
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.shared.server_process import ServeProcess
from gemserve_client.load_test import result_line
from gemserve_client.load_test.result_line import versions
from gemserve_client.load_test.text_table import aligned

CLIENT = Path(__file__).with_name("streaming_client.py")
CLIENTS = ("openai", "anthropic", "curl")
MARK = "REPLICA_KILLED_BENCHMARK"  # in the environment of all processes of one server
START_S, LOAD_S = 240.0, 400.0
THINGS = ["river", "harbour", "station", "lantern", "garden", "bridge", "tower", "market"]
LAST_BYTES = 300  # of curl's output, that the table of errors shows


@dataclass(frozen=True, slots=True)
class Ended:
    """One stream. `error`: what the client said, as class and message. `first_s`: None if no text
    came."""

    number: int
    client: str
    text: str
    error: str | None
    first_s: float | None
    ended_s: float


class Server(ServeProcess):
    def __init__(self, log: Path) -> None:
        self._mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GEMSERVE_", "RAY_"))}
        words = ["--replicas", "2", "--device", "cpu", "--filter", "none"]
        words += ["--kv-memory", "256MiB", "--cpu-step", "off"]
        super().__init__(words, log, {**kept, MARK: self._mark, "OMP_NUM_THREADS": "1"})

    def processes(self, kind: str = "") -> list[int]:
        """The server and all that it has started, whose command begins so."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes()
                if is_ours and (folder / "cmdline").read_text().startswith(kind):
                    found.append(int(folder.name))
        return found

    def num_ready(self) -> int:
        """The replicas that take requests, and whose engines answer."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        ready = re.search(r"^gemserve_replicas_ready (\S+)", text, re.MULTILINE)
        return min(int(float(ready[1])) if ready else 0, text.count("\ngemserve_engine_up{"))

    async def both_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while await asyncio.to_thread(self.num_ready) != 2:
                await asyncio.sleep(0.2)


class Load:
    """All streams at once, each client's own way. `has_begun` is set when all have text."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url, self._options = url, options
        self._first: dict[int, float] = {}
        self._waiting = set(range(options.streams))
        self.ended: list[Ended] = []
        self.has_begun = asyncio.Event()

    async def run(self) -> list[Ended]:
        async with asyncio.timeout(LOAD_S):
            await asyncio.gather(self._sdk("openai"), self._sdk("anthropic"), self._curls())
        return sorted(self.ended, key=lambda each: each.number)

    def _jobs(self, client: str) -> list[dict[str, Any]]:
        own = CLIENTS.index(client)
        return [
            {
                "number": number,
                "prompt": f"Say something about the {THINGS[number % len(THINGS)]} {number}.",
                "max_tokens": self._options.tokens,
            }
            for number in range(own, self._options.streams, len(CLIENTS))
        ]

    async def _sdk(self, client: str) -> None:
        python = sys.executable if client == "openai" else self._options.anthropic
        process = await asyncio.create_subprocess_exec(
            *(python, str(CLIENT), client),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"url": self._url, "jobs": self._jobs(client)}
        process.stdin.write(json.dumps(asked).encode())
        process.stdin.write_eof()
        async for line in process.stdout:
            told = json.loads(line)
            if told["event"] == "first":
                self._begun(told["number"], told["at_s"])
                continue
            error = told["error"] and f"{told['error']['class']}: {told['error']['message']}"
            self._end(told["number"], client, told["text"], error, told["at_s"])
        await process.wait()

    async def _curls(self) -> None:
        await asyncio.gather(*(self._curl(job) for job in self._jobs("curl")))

    async def _curl(self, job: dict[str, Any]) -> None:
        body = {
            "model": "builtin",
            "prompt": job["prompt"],
            "max_tokens": job["max_tokens"],
            "seed": job["number"],
            "ignore_eos": True,
            "stream": True,
        }
        process = await asyncio.create_subprocess_exec(
            *("curl", "-N", "-s", f"{self._url}/v1/completions", "-d", json.dumps(body)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        output, text = b"", ""
        async for line in process.stdout:
            output += line
            with suppress(ValueError, KeyError):
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            if text:
                self._begun(job["number"], time.monotonic())
        status = await process.wait()
        is_whole = b'"finish_reason": "length"' in output or b'"finish_reason":"length"' in output
        is_whole = is_whole and output.endswith(b"data: [DONE]\n\n") and status == 0
        said = f"exit status {status}: …{output[-LAST_BYTES:].decode(errors='replace')}"
        self._end(job["number"], "curl", text, None if is_whole else said, time.monotonic())

    def _begun(self, number: int, at_s: float) -> None:
        self._first.setdefault(number, at_s)
        self._waiting.discard(number)
        if not self._waiting:
            self.has_begun.set()

    def _end(self, number: int, client: str, text: str, error: str | None, at_s: float) -> None:
        self._begun(number, at_s)
        self.ended.append(Ended(number, client, text, error, self._first.get(number), at_s))


async def disturbed(
    server: Server, options: argparse.Namespace, disturb: Callable[[], None]
) -> Any:
    """The streams, when `disturb` was called, and how many had ended by then."""
    load = Load(server.url, options)
    running = asyncio.create_task(load.run())
    begun = asyncio.create_task(load.has_begun.wait())
    await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
    num_before = len(load.ended)
    disturb()
    at_s = time.monotonic()
    return running, at_s, num_before


def compared(ended: list[Ended], whole: list[Ended], at_s: float) -> dict[str, Any]:
    """How the streams went, beside those of the undisturbed run."""
    failed = [each for each in ended if each.error is not None]
    good = [each for each in ended if each.error is None]
    right = [each for each in ended if whole[each.number].text.startswith(each.text)]
    seconds = sorted(round(each.ended_s - at_s, 2) for each in failed)
    return {
        "streams": len(ended),
        "failed": len(failed),
        "failed_by_client": dict(Counter(each.client for each in failed)),
        "errors": {f"{client}: {text}": n for (client, text), n in _errors(failed).items()},
        "failed_after_s": [seconds[0], seconds[-1]] if seconds else None,
        "whole": len(good),
        "whole_as_undisturbed": sum(each in right for each in good),
        "failed_with_right_beginning": sum(each in right for each in failed),
        "last_ended_after_s": round(max(each.ended_s for each in ended) - at_s, 1),
    }


def _errors(failed: list[Ended]) -> Counter[tuple[str, str]]:
    """Errors by client, without what differs from request to request."""
    found: Counter[tuple[str, str]] = Counter()
    for each in failed:
        text = re.sub(r"(req|cmpl|msg)[-_][0-9a-f]+", r"\1-…", each.error or "")
        found[each.client, re.sub(r"^(exit status \d+: …).*?\n\n(?=data)", r"\1", text)] += 1
    return found


async def measure(server: Server, options: argparse.Namespace) -> list[dict[str, Any]]:
    await server.both_ready()
    await Load(server.url, argparse.Namespace(**{**vars(options), "tokens": 8})).run()  # warm-up
    began_s = time.monotonic()
    whole = await Load(server.url, options).run()
    rows = [{"disturbed_by": "nothing", **compared(whole, whole, began_s)}]
    rows.append(await killed(server, options, whole))
    rows.append(await drained(server, options, whole))
    return rows


async def killed(server: Server, options: argparse.Namespace, whole: list[Ended]) -> dict[str, Any]:
    victim = server.processes("ray::ServeReplica")[0]
    running, at_s, before = await disturbed(
        server, options, lambda: os.kill(victim, signal.SIGKILL)
    )
    ready = asyncio.create_task(_ready_again(server, victim))
    ended = await running
    again_s = await ready - at_s
    fields = {"ended_before": before, "both_ready_again_s": round(again_s, 1)}
    return {"disturbed_by": "kill -9", **fields, **compared(ended, whole, at_s)}


async def _ready_again(server: Server, victim: int) -> float:
    while victim in server.processes("ray::ServeReplica"):
        await asyncio.sleep(0.1)
    await server.both_ready()
    return time.monotonic()


async def drained(
    server: Server, options: argparse.Namespace, whole: list[Ended]
) -> dict[str, Any]:
    fewer = argparse.Namespace(**{**vars(options), "tokens": options.drain_tokens})
    running, at_s, before = await disturbed(server, fewer, server.process.terminate)
    await asyncio.sleep(0.5)
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
        refused = (await http.post("/v1/completions", json={"prompt": "Hi"})).status_code
    ended = await running
    await asyncio.to_thread(server.process.wait, 60)
    exit_s = time.monotonic() - at_s
    while server.processes() and time.monotonic() - at_s < LOAD_S:
        await asyncio.sleep(0.1)
    fields = {
        "ended_before": before,
        "new_request": refused,
        "exit_status": server.process.returncode,
        "server_ended_after_s": round(exit_s, 1),
        "processes_left": len(server.processes()),
        "last_process_ended_after_s": round(time.monotonic() - at_s, 1),
    }
    return {"disturbed_by": "SIGTERM", **fields, **compared(ended, whole, at_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--drain-tokens", type=int, default=100, help="of each while it drains")
    parser.add_argument(
        "--anthropic", required=True, help="a Python that has the package anthropic"
    )
    parser.add_argument("--log", type=Path, help="a file for the server's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.log or Path(folder) / "log")
        try:
            server.wait_until_ready(START_S)
            rows = asyncio.run(measure(server, options))
        finally:
            if server.process.poll() is None:
                server.stop(60)
    for row in rows:
        print(f"\n{row['disturbed_by']}")
        shown = [[name, str(value)] for name, value in row.items() if name != "errors"]
        print(aligned(shown))
        for error, count in row["errors"].items():
            print(f"{count} × {error}")
    print(result_line.line(result_line.result("replica_killed", "cpu", versions("ray"), rows)))


if __name__ == "__main__":
    main()
