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
import psutil

from benchmarks.other_servers import peer_models

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-peers"
SMOLLM2 = "smollm2"
# no other server proposes tokens unless it is told to
_STEPS = ("--prompt-lookup", "off")
_READY_S = 1800.0  # gemserve may have to calibrate a model, and vLLM to compile it
_FIRST_ANSWER_S = 300.0
_STOP_S = 15.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to ask a server: `fields` are added to the body of every request."""

    name: str
    server: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all servers, whatever is measured.

    `model`: "smollm2" or a GGUF file. `models`: a folder for its other forms, and for logs.
    `llama_server`: the program that "llama.cpp-native" runs.
    """

    model: str
    models: Path
    llama_server: Path | None = None

    @property
    def name(self) -> str:
        return peer_models.name_of(self.model)


@dataclass(frozen=True, slots=True)
class Room:
    """How many streams a server has at once, and the tokens of each, with its answer."""

    streams: int
    context: int


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


# How a server is started for a port.
Kind = Callable[[Setup, Room, int], Command]


def _gemserve(*more: str) -> Kind:
    def command(setup: Setup, room: Room, port: int) -> Command:
        program = Path(sys.executable).parent / "gemserve"
        named = ["--model", setup.model, "--served-model-name", setup.name]
        return Command([str(program), "serve", *named, "--port", str(port), *more])

    return command


def _vllm(*more: str, on_all_cores: bool = True) -> Kind:
    def command(setup: Setup, room: Room, port: int) -> Command:
        program = ENVIRONMENTS / "vllm" / "bin" / "vllm"
        model = peer_models.write_checkpoint(setup.model, setup.models / setup.name)
        limits = ["--max-model-len", str(room.context), "--max-num-seqs", str(room.streams)]
        served = ["--served-model-name", setup.name, "--port", str(port), "--host", "127.0.0.1"]
        words = [str(program), "serve", str(model), "--dtype", "bfloat16", *limits, *served, *more]
        environment = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(vllm_kv_gib(setup, room)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        if on_all_cores:  # else it leaves one to its scheduler, and computes on the others
            environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
            environment["OMP_NUM_THREADS"] = str(_num_cores())
        return Command(words, environment)

    return command


def vllm_kv_gib(setup: Setup, room: Room) -> int:
    """vLLM's memory for keys and values: it takes whole GiB, and all of it at its start."""
    needed = room.streams * room.context * peer_models.kv_bytes_per_token(setup.model)
    return -(-needed // _GIB)


def _llama(find: Callable[[Setup], Path]) -> Kind:
    def command(setup: Setup, room: Room, port: int) -> Command:
        # a build that runs everywhere, so without AVX-512
        program = ENVIRONMENTS / "llama" / "bin" / "python"
        script = Path(__file__).with_name("llama_server.py")
        numbers = (port, room.streams, room.context, _num_cores())
        return Command(
            [str(program), str(script), str(find(setup)), setup.name, *map(str, numbers)]
        )

    return command


def _llama_native(setup: Setup, room: Room, port: int) -> Command:
    assert setup.llama_server is not None, "refused by the script's options"
    options = {
        "--model": peer_models.gguf_file(setup.model),
        "--alias": setup.name,
        "--host": "127.0.0.1",
        "--port": port,
        "--parallel": room.streams,
        "--ctx-size": room.streams * room.context,
        "--threads": _num_cores(),
        "--threads-batch": _num_cores(),
        "--cache-ram": 0,
    }
    words = [str(word) for option in options.items() for word in option]
    # shared by all streams otherwise, and one of them could have more than its context
    switches = ["--no-kv-unified", "--no-cache-prompt", "--no-webui", "--jinja"]
    return Command([str(setup.llama_server), *words, *switches])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


SERVERS: Mapping[str, Kind] = {
    "gemserve": _gemserve("--cache-memory", "0", *_STEPS),
    "gemserve-document-cache": _gemserve(*_STEPS),
    "gemserve-bf16": _gemserve(
        "--cache-memory", "0", "--dtype", "bfloat16", "--weights", "dense", *_STEPS
    ),
    "vllm": _vllm("--no-enable-prefix-caching"),
    "vllm-as-it-comes": _vllm("--no-enable-prefix-caching", on_all_cores=False),
    "vllm-prefix-cache": _vllm("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    "llama.cpp-bf16": _llama(
        lambda setup: peer_models.write_bfloat16_gguf(
            setup.model, setup.models / f"{setup.name}-bf16.gguf"
        )
    ),
    "llama.cpp": _llama(lambda setup: peer_models.gguf_file(setup.model)),
    "llama.cpp-native": _llama_native,
}
NATIVE = "llama.cpp native"
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
        Contestant("llama.cpp", "llama.cpp", {"cache_prompt": False}),
        Contestant(NATIVE, "llama.cpp-native", {"cache_prompt": False}),
    )
}


class Server:
    """A running server. It is stopped by SIGSTOP whenever it is not measured.

    `ready_s`: from its start to the answer to its first request.
    """

    def __init__(self, name: str, setup: Setup, room: Room, port: int) -> None:
        command = SERVERS[name](setup, room, port)
        program = Path(command.words[0])
        if not program.exists():
            raise FileNotFoundError(f"{program}: run `make peers` first")
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = setup.models / f"{name}.log"
        began_s = time.perf_counter()
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command.words,
                env={**os.environ, **command.environment, "HF_HUB_OFFLINE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait()
        self._ask_first(setup.name)
        self.ready_s = time.perf_counter() - began_s
        self._signal(signal.SIGSTOP)

    def resident_bytes(self) -> int:
        return resident_bytes(self._process.pid)

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
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{self.name} did not start; see {self._log}")

    def _ask_first(self, model: str) -> None:
        message = {"role": "user", "content": "Say hello."}
        body = {"model": model, "messages": [message], "max_tokens": 1}
        try:
            url = f"{self.url}/v1/chat/completions"
            httpx.post(url, json=body, timeout=_FIRST_ANSWER_S).raise_for_status()
        except httpx.HTTPError as error:
            self.stop()
            raise RuntimeError(f"{self.name} did not answer: {error}; see {self._log}") from error

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def resident_bytes(pid: int) -> int:
    """The memory of a process and all that it has started. Linux only.

    What several processes share counts once, by their shares of it. Pages of files are those of the
    process with most of them: its share of them would depend on other servers, which may have
    mapped the same model file.
    """
    process = psutil.Process(pid)
    folders = [Path(f"/proc/{p.pid}") for p in (process, *process.children(recursive=True))]
    shares = [_kibibytes(folder / "smaps_rollup") for folder in folders]
    of_files = [_kibibytes(folder / "status")["RssFile"] for folder in folders]
    memory = sum(share["Pss_Anon"] + share["Pss_Shmem"] for share in shares)
    return (memory + max(of_files)) << 10


def _kibibytes(path: Path) -> dict[str, int]:
    words = [line.split() for line in path.read_text().splitlines()]
    return {w[0].removesuffix(":"): int(w[1]) for w in words if len(w) == 3 and w[2] == "kB"}
