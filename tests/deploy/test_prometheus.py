"""A real Prometheus scrapes a real server under load: `make test-deploy`.

Its queries are those of the dashboard, and its rules those of deploy/, with a minute shortened to
two seconds.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.distribution.test_deploy import DEPLOY, QUERIES

SECONDS_PER_MINUTE = 2
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
)
DOCUMENT = " ".join(
    f"The colour of box {n} is blue, and that of lid {n} is red." for n in range(60)
)
PATIENCE_S = 240.0
ABOUT_REPLICAS = re.compile('gemserve_(ingress|replicas)_|replica="ingress"')


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    ran = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_rules_and_configuration_are_valid() -> None:
    promtool("check", "rules", str(DEPLOY / "alerts.yml"))
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yml"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path, is_up: Callable[[], bool]) -> Iterator[Any]:
    """A program, from the time when it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        program = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        wait_for(is_up, lambda: log.read_text("utf-8"))
        yield program
    finally:
        program.terminate()  # replicas are stopped then, too
        try:
            program.wait(60)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for(condition: Callable[[], object], describe: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, and the Prometheus that scrapes it."""

    server: str
    prometheus: str
    process: Any

    def ask(self, kind: int) -> int:
        """One request of several kinds; its status."""
        chat: dict[str, Any] = {
            "model": "builtin",
            "messages": [{"role": "user", "content": f"{DOCUMENT} {kind}\n\nWhat is box {kind}?"}],
            "max_tokens": 24,
            "ignore_eos": True,
            "stream": kind % 2 == 0,
            "filter": {"fallback": False},
        }
        if kind % 3 == 0:
            chat["messages"] = [{"role": "user", "content": "What is the colour of box 7?"}]
        url = f"{self.server}/v1/chat/completions"
        return httpx.post(url, json=chat, timeout=PATIENCE_S).status_code

    @contextmanager
    def load(self, clients: int) -> Iterator[None]:
        """Clients that ask again and again."""
        ended = threading.Event()

        def ask_on(kind: int) -> None:
            while not ended.is_set():
                self.ask(kind)
                kind += clients

        threads = [threading.Thread(target=ask_on, args=(kind,)) for kind in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)

    def query(self, expression: str) -> list[float]:
        """The values of a query of the dashboard."""
        filled = expression.replace("$__rate_interval", "30s").replace("$instance", ".*")
        reply = httpx.get(
            f"{self.prometheus}/api/v1/query", params={"query": filled}, timeout=30
        ).json()
        assert reply["status"] == "success", (filled, reply)
        values = [float(series["value"][1]) for series in reply["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def alerts(self) -> dict[str, str]:
        """The alerts that are pending or firing."""
        reply = httpx.get(f"{self.prometheus}/api/v1/alerts", timeout=30).json()
        return {a["labels"]["alertname"]: a["state"] for a in reply["data"]["alerts"]}


def shortened(rules: str) -> str:
    """Rules whose minutes are shorter."""

    def shorten(found: re.Match[str]) -> str:
        minutes = int(found[2]) * (60 if found[3] == "h" else 1)
        return f"{found[1]}{minutes * SECONDS_PER_MINUTE}s"

    return re.sub(r"(for: |\[)(\d+)(m|h)\b", shorten, rules)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("prometheus")) as one:
        yield one


@contextmanager
def watched_server(folder: Path, *options: str) -> Iterator[Watched]:
    port, other = free_port(), free_port()
    server, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
    (folder / "alerts.yml").write_text(shortened((DEPLOY / "alerts.yml").read_text("utf-8")))
    config = (DEPLOY / "prometheus.yml").read_text("utf-8")
    for old, new in (
        ("gemserve:8000", f"127.0.0.1:{port}"),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
    ):
        assert old in config
        config = config.replace(old, new)
    (folder / "prometheus.yml").write_text(config)
    serve = [sys.executable, "-m", "gemserve.cli.main", "serve", "--model", "builtin"]
    serve += ["--port", str(port), "--max-running", "1", "--max-queue", "3"]
    serve += ["--filter-min-tokens", "64", "--filter-keep", "128", "--log-format", "json"]
    serve += options
    assert PROMETHEUS is not None
    scrape = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}"]
    scrape += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{other}"]
    with (
        running(serve, folder / "server.log", lambda: answers(f"{server}/health")) as process,
        running(scrape, folder / "prom.log", lambda: answers(f"{prometheus}/-/ready")),
    ):
        yield Watched(server, prometheus, process)


def test_every_query_of_an_engine_returns_data(watched: Watched) -> None:
    all_return_data(watched, [query for query in QUERIES if not ABOUT_REPLICAS.search(query)])


@pytest.mark.timeout(900)
def test_every_query_returns_data_with_replicas(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the packages of gemserve[ray]")
    with watched_server(tmp_path, "--replicas", "2", "--device", "cpu") as watched:
        headers = {"Host": "elsewhere.example"}
        assert httpx.get(f"{watched.server}/v1/models", headers=headers).status_code == 403
        rate_of_refusals = [query for query in QUERIES if 'replica="ingress"' in query]
        assert len(rate_of_refusals) == 1
        all_return_data(watched, QUERIES)
        wait_for(lambda: len(watched.query("gemserve_engine_up")) == 2, watched.alerts)
        assert watched.query("gemserve_replicas_wanted") == [2.0]


def all_return_data(watched: Watched, queries: list[str]) -> None:
    missing = list(queries)

    def all_have_data() -> bool:
        missing[:] = [query for query in missing if not watched.query(query)]
        return not missing

    with watched.load(clients=3):
        wait_for(all_have_data, lambda: missing)


def test_an_overload_fires_an_alert_that_clears(watched: Watched) -> None:
    assert "GemserveRejecting" not in watched.alerts()
    with watched.load(clients=12):
        wait_for(lambda: watched.alerts().get("GemserveRejecting") == "firing", watched.alerts)
    wait_for(lambda: not watched.alerts(), watched.alerts)


def test_a_server_that_is_gone_fires_an_alert(watched: Watched) -> None:
    watched.process.kill()
    wait_for(lambda: watched.alerts().get("GemserveDown") == "firing", watched.alerts)
