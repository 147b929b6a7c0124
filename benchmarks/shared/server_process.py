"""Servers in processes of their own: a free port, the start, waiting until ready, and the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServeProcess:
    """`gemserve serve` on a free port of this machine, with its output in the file `log`."""

    def __init__(
        self, options: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`options`: after `serve --port PORT`. `environment`: instead of this process's."""
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["--port", str(self.port), *options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gemserve.cli.main", "serve", *words],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def wait_until_ready(self, limit_s: float, pause_s: float = 0.2) -> set[str]:
        """What `/ready` said before. Raises `RuntimeError` if the server does not start."""
        said: set[str] = set()
        ends_s = time.monotonic() + limit_s
        while time.monotonic() < ends_s and self.process.poll() is None:
            try:
                reply = httpx.get(f"{self.url}/ready", timeout=5)
                if reply.status_code == 200:
                    return said
                said.add(reply.json()["status"])
            except httpx.HTTPError:
                pass
            time.sleep(pause_s)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')}")

    def stop(self, limit_s: float) -> None:
        """Ask the process to end, and kill it after `limit_s`."""
        self.process.terminate()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def resident_bytes(self) -> int:
        """What the process has in memory now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
