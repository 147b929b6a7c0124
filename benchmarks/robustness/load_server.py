"""A real `gemserve serve` in a process of its own: keys, adapters, its numbers, its processor core.

`soak.py` and `overload.py` start it, each for one run.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

READY_S = 1800.0  # the process may be stopped for a while, when others measure on this machine
TENANTS = ("alice", "bob")
ADMIN = "admin"
ADAPTERS = {"activation": 3, "prefix": 4, "ntk": 5}  # kinds and seeds
TURNING = "turning"  # the name of the adapter that is replaced again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the server's process holds at one moment."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    tasks: int
    running: int
    waiting: int
    kv_usage: float
    cache_usage: float
    cpu_s: float
    processes: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


class LoadServer:
    """The server of one run. The context ends it.

    `core` is the processor core that it is bound to, or None. It then computes with one thread.
    """

    def __init__(
        self, folder: Path, *, model: str, core: int | None, settings: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self.log = folder / "server.log"
        self.model = model
        self._core = core
        self._began_s = time.monotonic()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys = {name: f"sk-{name}-{os.urandom(12).hex()}" for name in (*TENANTS, ADMIN)}
        self._settings = settings

    def __enter__(self) -> LoadServer:
        # without this a script that is terminated would leave its server behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        keys, admins = self._folder / "keys", self._folder / "admins"
        keys.write_text("".join(f"{self.keys[name]}\n" for name in TENANTS))
        admins.write_text(self.keys[ADMIN] + "\n")
        words = ["serve", "--model", self.model, "--port", str(self.port), *self._settings]
        words += ["--api-key-file", str(keys), "--admin-key-file", str(admins)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gemserve.cli.main", *words],
                stdout=output,
                stderr=output,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **self._thread_settings()},
            )
        if self._core is not None:
            os.sched_setaffinity(self._process.pid, {self._core})
        ends_s = time.monotonic() + READY_S
        while time.monotonic() < ends_s and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text(errors='replace')}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _thread_settings(self) -> dict[str, str]:
        return {} if self._core is None else {"OMP_NUM_THREADS": "1"}

    def resident_bytes(self) -> int:
        """What the process has in memory now."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def errors_in_log(self) -> list[str]:
        """Lines that tell of a mistake of the server's."""
        text = self.log.read_text(errors="replace")
        return [line[:300] for line in text.splitlines() if re.search(r"Traceback|ERROR", line)]

    async def sample(self, http: httpx.AsyncClient) -> Sample:
        """Read `/metrics`, and what the operating system says of the process."""
        metrics = numbers_of((await http.get(f"{self.url}/metrics", timeout=120)).text)
        process = Path(f"/proc/{self._process.pid}")
        status = dict(
            line.split(":", 1) for line in (process / "status").read_text().splitlines() if line
        )
        children = (process / "task" / str(self._process.pid) / "children").read_text().split()
        return Sample(
            at_s=round(time.monotonic() - self._began_s, 3),
            rss_bytes=self.resident_bytes(),
            descriptors=len(list((process / "fd").iterdir())),
            threads=int(status["Threads"]),
            tasks=int(metrics["gemserve_event_loop_tasks"]),
            running=int(metrics["gemserve_num_requests_running"]),
            waiting=int(metrics["gemserve_num_requests_waiting"]),
            kv_usage=metrics["gemserve_kv_cache_usage_ratio"],
            cache_usage=metrics["gemserve_document_cache_usage_ratio"],
            cpu_s=metrics["process_cpu_seconds_total"],
            processes=len(children),
        )


def numbers_of(metrics: str) -> dict[str, float]:
    """The values of `/metrics` that have no labels."""
    found = re.findall(r"^(\w+) (\S+)$", metrics, re.MULTILINE)
    return {name: float(value) for name, value in found}


def write_adapters(folder: Path, model_name: str) -> list[str]:
    """Write random adapters that change answers. Return the server's options for them.

    `turn-a` and `turn-b` are what the adapter `TURNING` is loaded from, in turn.
    """
    import torch

    from gemserve.adapters.folder import write_folder
    from gemserve.config import ModelConfig
    from gemserve.model.base_model import base_of
    from gemserve.model.loader import load

    model = load(ModelConfig(model=model_name)).model
    shape, base = model.shape, base_of(model)

    def write(name: str, kind: str, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        heads = (shape.num_layers, shape.num_heads)
        settings: dict[str, Any] = {}
        if kind == "activation":
            settings = {"layer": 1}
            tensors = {"vector": torch.randn(shape.hidden_size, generator=g)}
        elif kind == "prefix":
            one = (shape.num_layers, shape.num_kv_heads, 7, shape.head_dim)
            tensors = {part: torch.randn(*one, generator=g) * 2 for part in ("keys", "values")}
        else:
            width = 2 * shape.head_dim
            tensors = {
                "z_a": torch.randn(*heads, width, 4, generator=g) * 0.5,
                "z_b": torch.randn(*heads, 4, shape.head_dim, generator=g),
                "k": torch.rand(*heads, width, generator=g),
            }
        write_folder(folder / name, kind=kind, settings=settings, tensors=tensors, base=base)

    for kind, seed in ADAPTERS.items():
        write(kind, kind, seed)
    write("turn-a", "activation", 11)
    write("turn-b", "activation", 12)
    options = ["--adapter-dir", str(folder), "--adapter", f"{TURNING}=turn-a"]
    for kind in ADAPTERS:
        options += ["--adapter", f"{kind}={kind}"]
    return options
