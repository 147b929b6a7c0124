"""A real `gemserve serve` in a process of its own: keys, adapters, its numbers, its processor core.

`soak.py` and `overload.py` start it, each for one run.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.shared.server_process import ServeProcess
from gemserve.adapters.folder import write_folder
from gemserve.config import ModelConfig
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import load
from gemserve.model.passes.causal_model import CausalModel

READY_S = 1800.0  # the process may be stopped for a while, when others measure on this machine
TENANTS = ("alice", "bob")
ADMIN = "admin"
_SCHEDULED = 2  # the kind of a process's clock that counts what the scheduler has given it
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
        self.keys = {name: f"sk-{name}-{os.urandom(12).hex()}" for name in (*TENANTS, ADMIN)}
        self._settings = settings

    def __enter__(self) -> LoadServer:
        # without this a script that is terminated would leave its server behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        keys, admins = self._folder / "keys", self._folder / "admins"
        keys.write_text("".join(f"{self.keys[name]}\n" for name in TENANTS))
        admins.write_text(self.keys[ADMIN] + "\n")
        options = ["--model", self.model, *self._settings]
        options += ["--api-key-file", str(keys), "--admin-key-file", str(admins)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if self._core is not None:
            environment["OMP_NUM_THREADS"] = "1"
        self._server = ServeProcess(options, self.log, environment)
        self.url, self.port = self._server.url, self._server.port
        if self._core is not None:
            os.sched_setaffinity(self._server.process.pid, {self._core})
        try:
            self._server.wait_until_ready(READY_S)
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(60)

    @property
    def is_alive(self) -> bool:
        return self._server.process.poll() is None

    def resident_bytes(self) -> int:
        return self._server.resident_bytes()

    def processor_s(self) -> float:
        """Seconds of processor time that the server's threads have had."""
        clock = (~self._server.process.pid << 3) | _SCHEDULED  # see clock_getcpuclockid(3)
        return time.clock_gettime(clock)

    def errors_in_log(self) -> list[str]:
        """Lines that tell of a mistake of the server's."""
        text = self.log.read_text(errors="replace")
        return [line[:300] for line in text.splitlines() if re.search(r"Traceback|ERROR", line)]

    async def sample(self, http: httpx.AsyncClient) -> Sample:
        """Read `/metrics`, and what the operating system says of the process."""
        metrics = numbers_of((await http.get(f"{self.url}/metrics", timeout=120)).text)
        process = Path(f"/proc/{self._server.process.pid}")
        status = dict(
            line.split(":", 1) for line in (process / "status").read_text().splitlines() if line
        )
        children = (process / "task" / process.name / "children").read_text().split()
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
    model = load(ModelConfig(model=model_name)).model
    for kind, seed in ADAPTERS.items():
        write_random_adapter(folder / kind, kind, model, seed)
    write_random_adapter(folder / "turn-a", "activation", model, 11)
    write_random_adapter(folder / "turn-b", "activation", model, 12)
    options = ["--adapter-dir", str(folder), "--adapter", f"{TURNING}=turn-a"]
    for kind in ADAPTERS:
        options += ["--adapter", f"{kind}={kind}"]
    return options


def write_random_adapter(folder: Path, kind: str, model: CausalModel, seed: int) -> None:
    """An adapter of one of our kinds, strong enough to change answers."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    shape = model.shape
    heads = (shape.num_layers, shape.num_heads)
    settings: dict[str, Any] = {}
    if kind == "activation":
        settings = {"layer": 1}
        tensors = {"vector": draw(shape.hidden_size)}
    elif kind == "prefix":
        one = (shape.num_layers, shape.num_kv_heads, 7, shape.head_dim)
        tensors = {part: draw(*one) * 2 for part in ("keys", "values")}
    else:
        width = 2 * shape.head_dim
        tensors = {
            "z_a": draw(*heads, width, 4) * 0.5,
            "z_b": draw(*heads, 4, shape.head_dim),
            "k": torch.rand(*heads, width, generator=generator),
        }
    write_folder(folder, kind=kind, settings=settings, tensors=tensors, base=base_of(model))
