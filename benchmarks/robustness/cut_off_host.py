"""What do clients see when the network between two hosts of a cluster is cut for a while?

    sudo .venv/bin/python benchmarks/robustness/cut_off_host.py --cut-s 30

Two network namespaces are the hosts. A cluster of Ray has a node and a replica on each, with the
built-in model and one thread, as `gemserve_fleet.ray_app` builds it. Clients on the head's host
stream answers all the time. Then the other host cannot be reached for `--cut-s` seconds.

A node that has been cut off for long ends by itself. It is started again, as a supervisor would do.

The table says how requests ended and how long they took, by when they ran. A request is right if it
ended with exactly one terminal event, and a whole answer equals the one that its prompt has on an
idle cluster. The last line is JSON. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness.two_hosts import HEAD, Host, NotPossible, TwoHosts, two_hosts
from gemserve_client.load_test import result_line
from gemserve_client.load_test.result_line import versions
from gemserve_client.load_test.text_table import aligned

ROOT = Path(__file__).parents[2]
GCS_PORT, HTTP_PORT = 6379, 8313
URL = f"http://{HEAD}:{HTTP_PORT}"
START_S = 180.0
WATCH_PERIOD_S = 0.5
OBJECT_STORE_BYTES = 100 << 20
PROMPTS = [f"The {thing} of the river is" for thing in ("name", "end", "colour", "bed", "sound")]
FLEET = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": HEAD, "port": HTTP_PORT},
    "applications": [
        {
            "name": "gemserve",
            "route_prefix": "/",
            "import_path": "gemserve_fleet.ray_app:build",
            "args": {
                "model": "builtin",
                "replicas": 2,
                "kv-memory": "256MiB",
                "device": "cpu",
                "filter": "none",
                "allowed-host": HEAD,
                "cpu-step": "off",
                "keep-alive": 5,
            },
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are seconds since the first request of the load.

    `ending`: `whole`, the code of an error, `not connected`, or `no end` without a terminal event.
    `silence_s`: the longest time in which neither a token nor the end came.
    """

    began_s: float
    ended_s: float
    silence_s: float
    ending: str
    is_right: bool


class Watcher:
    """Follows `gemserve_replicas_ready`, and which replicas answer."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.changes: list[tuple[float, int, int]] = []  # when, ready, answering
        self.last = "nothing yet"

    async def look(self) -> tuple[int, int]:
        try:
            text = self.last = (await self._http.get("/metrics", timeout=20)).text
        except httpx.HTTPError as error:
            self.last = repr(error)
            return 0, 0
        ready = re.search(r"^gemserve_replicas_ready (\S+)", text, re.MULTILINE)
        return int(float(ready[1])) if ready else 0, text.count("\ngemserve_engine_up{")

    async def watch(self, began: float) -> None:
        while True:
            seen = await self.look()
            if not self.changes or self.changes[-1][1:] != seen:
                self.changes.append((round(time.monotonic() - began, 1), *seen))
            await asyncio.sleep(WATCH_PERIOD_S)

    async def wait_for_both(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while await self.look() != (2, 2):
                    await asyncio.sleep(WATCH_PERIOD_S)
                return True
        return False


class Load:
    """Clients that stream one answer after the other."""

    def __init__(self, http: httpx.AsyncClient, num_tokens: int) -> None:
        self._http, self._num_tokens = http, num_tokens
        self.expected: dict[str, str] = {}
        self.outcomes: list[Outcome] = []
        self.is_over = False
        self.began = time.monotonic()

    async def learn(self) -> None:
        """Ask for each prompt's answer alone."""
        for prompt in PROMPTS:
            text, ending, _ = await self._stream(prompt)
            if ending != "whole":
                raise RuntimeError(f"the idle cluster ends a stream with: {ending}")
            self.expected[prompt] = text
        self.began = time.monotonic()

    async def run(self, client: int) -> None:
        turn = client
        while not self.is_over:
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            began = time.monotonic()
            text, ending, silence_s = await self._stream(prompt)
            is_right = ending not in ("no end", "not connected")
            if ending == "whole":
                is_right = text == self.expected[prompt]
            now = time.monotonic()
            self.outcomes.append(
                Outcome(began - self.began, now - self.began, silence_s, ending, is_right)
            )
            await asyncio.sleep(0.5)

    async def _stream(self, prompt: str) -> tuple[str, str, float]:
        """(text, ending, longest silence) of one stream."""
        body = {
            "model": "builtin",
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        lines: list[str] = []
        last, silence_s = time.monotonic(), 0.0
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    error = json.loads(await reply.aread())["error"]
                    return "", f"{reply.status_code} {error['code']}", time.monotonic() - last
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        now = time.monotonic()
                        last, silence_s = now, max(silence_s, now - last)
                        lines.append(line.removeprefix("data: "))
        except httpx.ConnectError:
            return "", "not connected", time.monotonic() - last
        except httpx.HTTPError as error:
            lines.append(json.dumps({"broken": type(error).__name__}))
        silence_s = max(silence_s, time.monotonic() - last)
        return *read_stream(lines), silence_s


def read_stream(data: Sequence[str]) -> tuple[str, str]:
    """(text, ending) of a stream's events. Its end is one finish reason or one error."""
    if list(data).count("[DONE]") != 1 or data[-1] != "[DONE]":
        return "", "no end"
    events = [json.loads(each) for each in data[:-1]]
    errors = [event["error"]["code"] for event in events if "error" in event]
    choices = [choice for event in events for choice in event.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if len(errors) + len(reasons) != 1:
        return "", "no end"
    return "".join(choice["text"] for choice in choices), errors[0] if errors else "whole"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts with Ray on them, and how the other host's node is started."""

    hosts: TwoHosts
    start_other: Callable[[], Popen[bytes]]

    async def supervise(self, began: float, starts: list[float]) -> None:
        """Start the other host's node when it has ended, and note when."""
        node = self.hosts.other.programs[0]
        while True:
            if node.poll() is not None:
                starts.append(round(time.monotonic() - began, 1))
                node = self.start_other()
            await asyncio.sleep(1.0)


def fleet(health_check_s: float | None) -> dict[str, Any]:
    """`FLEET`, with another time in which a replica must answer each of three health checks."""
    changed: dict[str, Any] = json.loads(json.dumps(FLEET))
    if health_check_s is not None:
        replica = {"name": "replica", "health_check_timeout_s": health_check_s}
        changed["applications"][0]["deployments"] = [replica]
    return changed


def start_cluster(hosts: TwoHosts, folder: Path, health_check_s: float | None) -> Cluster:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GEMSERVE_",))}
    environment = {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    }
    programs = Path(sys.executable).parent

    def start_node(name: str, host: Host, *join: str) -> Popen[bytes]:
        words = [*(str(programs / "ray"), "start", "--block"), *join]
        words += ["--node-ip-address", host.address, "--num-cpus", "1", "--num-gpus", "0"]
        words += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats"]
        words += ["--temp-dir", str(folder / name)]
        return host.start(words, folder / f"{name}.log", environment)

    def start_other() -> Popen[bytes]:
        return start_node("other", hosts.other, "--address", f"{HEAD}:{GCS_PORT}")

    start_node("head", hosts.head, "--head", "--port", str(GCS_PORT), "--include-dashboard=false")
    _wait_for_line(folder / "head.log", "Ray runtime started", hosts.head)
    start_other()
    _wait_for_line(folder / "other.log", "Ray runtime started", hosts.other)
    (folder / "fleet.yaml").write_text(json.dumps(fleet(health_check_s)))  # JSON is YAML, too
    serve = [str(programs / "serve"), "run", "--address", f"{HEAD}:{GCS_PORT}"]
    serve += ["--app-dir", str(ROOT), str(folder / "fleet.yaml")]
    hosts.head.start(serve, folder / "serve.log", environment)
    return Cluster(hosts, start_other)


def _wait_for_line(log: Path, text: str, host: Host) -> None:
    ends_s = time.monotonic() + START_S
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > ends_s or host.programs[-1].poll() is not None:
            raise RuntimeError(f"{log.name}: no {text!r}:\n{log.read_text(errors='replace')}")
        time.sleep(0.2)


def count_replicas(host: Host) -> int:
    """The replicas' processes on a host, whoever still knows of them."""
    found = 0
    for pid in host.processes():
        with suppress(OSError):
            found += "ServeReplica:gemserve:replica" in Path(f"/proc/{pid}/cmdline").read_text()
    return found


async def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    hosts = cluster.hosts
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=URL, limits=limits, timeout=options.patience_s, trust_env=False
    ) as http:
        watcher, load = Watcher(http), Load(http, options.tokens)
        if not await watcher.wait_for_both(START_S):
            raise RuntimeError(f"the replicas are not ready: {watcher.last}")
        await load.learn()
        starts: list[float] = []
        tasks = [
            asyncio.create_task(watcher.watch(load.began)),
            asyncio.create_task(cluster.supervise(load.began, starts)),
        ]
        clients = [asyncio.create_task(load.run(number)) for number in range(options.clients)]
        await asyncio.sleep(options.before_s)
        hosts.cut()
        cut_s = time.monotonic() - load.began
        await asyncio.sleep(options.cut_s)
        hosts.restore()
        restored_s = time.monotonic() - load.began
        is_whole = await watcher.wait_for_both(options.patience_s)
        whole_s = time.monotonic() - load.began
        await asyncio.sleep(options.after_s)
        load.is_over = True
        await asyncio.wait(clients, timeout=options.patience_s)
        for task in (*tasks, *clients):
            task.cancel()
    lost = [when for when, ready, _ in watcher.changes if ready < 2 and when > cut_s]
    return {
        "cut_s": round(cut_s, 1),
        "restored_s": round(restored_s, 1),
        "lost_noticed_after_s": round(lost[0] - cut_s, 1) if lost else None,
        "whole_again_after_restoring_s": round(whole_s - restored_s, 1) if is_whole else None,
        "changes": watcher.changes,
        "replica_processes": [count_replicas(host) for host in (hosts.head, hosts.other)],
        "other_node_started_again_s": starts,
        "without_end": sum(not client.done() for client in clients),
        "outcomes": load.outcomes,
    }


def phase(outcome: Outcome, cut_s: float, restored_s: float) -> str:
    if outcome.ended_s < cut_s:
        return "1 before the cut"
    if outcome.began_s < cut_s:
        return "2 running when it was cut"
    return "3 begun during the cut" if outcome.began_s < restored_s else "4 begun after it"


def table(found: dict[str, Any]) -> str:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in found["outcomes"]:
        groups[phase(outcome, found["cut_s"], found["restored_s"]), outcome.ending].append(outcome)
    rows = [["requests", "ended", "number", "right", "seconds, most", "silence in s, most"]]
    for (when, ending), group in sorted(groups.items()):
        seconds = max(outcome.ended_s - outcome.began_s for outcome in group)
        silence = max(outcome.silence_s for outcome in group)
        num_right = sum(outcome.is_right for outcome in group)
        rows.append(
            [when[2:], ending, str(len(group)), str(num_right), f"{seconds:.1f}", f"{silence:.1f}"]
        )
    return aligned(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cut-s", type=float, default=30.0)
    parser.add_argument("--before-s", type=float, default=15.0, help="of load before the cut")
    parser.add_argument("--after-s", type=float, default=15.0, help="of load after both are back")
    parser.add_argument("--patience-s", type=float, default=240.0, help="the longest wait")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--health-check-s", type=float, help="in place of 5")
    parser.add_argument("--keep-logs", type=Path, help="a folder for the logs of Ray")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cut-", dir="/tmp"))  # sockets' paths must be short
    try:
        with two_hosts() as hosts:
            try:
                cluster = start_cluster(hosts, folder, options.health_check_s)
                hosts.head.enter()
                found = asyncio.run(measure(cluster, options))
            finally:
                if options.keep_logs is not None:
                    shutil.copytree(
                        folder, options.keep_logs, ignore=shutil.ignore_patterns("sockets")
                    )
    except NotPossible as error:
        raise SystemExit(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(found))
    outcomes = [asdict(outcome) for outcome in found.pop("outcomes")]
    for name, value in found.items():
        print(f"{name}: {value}")
    found["outcomes"] = outcomes
    rows = [found]
    print(result_line.line(result_line.result("cut_off_host", "cpu", versions("ray"), rows)))


if __name__ == "__main__":
    main()
