"""Servers for other projects' clients: one with known answers, and one with the built-in model."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shared.server_process import ServeProcess
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.contract.events import Event
from gemserve.contract.requests import Request
from gemserve.engine.build import build_core
from tests.fakes import FILTERED, FakeCore, FakeJob, Step, live_server, serving_over, wait_for

REPLICAS = "TEST_REPLICAS"
START_S, STOP_S = 240.0, 60.0  # for machines that are busy
TEXT = "Héllo 🌍!"
DOCUMENT = "The river runs past the houses. " * 150
# A document with a fact, which the built-in model finds.
QUESTION = "What is the code for the lantern?"
FACT = "The code for the lantern is 48213. "
FILLER = "The river runs past the houses, they say; nobody counts them. " * 100
NOTES = FILLER + FACT + FILLER
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
WEATHER = "21 degrees and dry"
FORECAST = '{"city": "Paris", "degrees": 21}'


class Answers(FakeCore):
    """Plays one script for each request, and repeats the last one."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        super().__init__(*scripts[0])
        self._scripts = list(scripts)

    def play(self, *scripts: Sequence[Step]) -> None:
        """Play these from the next request on."""
        self._scripts = list(scripts)

    def answer(self, *answers: str) -> None:
        self.play(*([FILTERED, *pieces(answer)] for answer in answers))

    def _play(self, request: Request, job: FakeJob) -> Iterator[Event | None]:
        self.script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        yield from super()._play(request, job)


@dataclass(frozen=True, slots=True)
class Place:
    """What a client's program is told about the server it talks to."""

    root: str
    api: str = "chat"

    def described(self) -> dict[str, str]:
        return {
            "root": self.root,
            "url": f"{self.root}/v1",
            "api": self.api,
            "text": TEXT,
            "document": DOCUMENT,
            "weather": WEATHER,
        }


def texts(*answers: str) -> Answers:
    """A core that gives these answers, the first one to the first request."""
    return Answers(*([FILTERED, *pieces(answer)] for answer in answers))


def pieces(answer: str) -> list[str]:
    """Several tokens, because a stream of one proves little."""
    return [answer[start : start + 5] for start in range(0, len(answer), 5)]


@contextmanager
def scripted(
    core: FakeCore,
    tokenizer: Any,
    context_tokens: int = 16000,
    around: Callable[[Any], Any] | None = None,
    **server: Any,
) -> Iterator[str]:
    """The default leaves room for the long instructions of agents."""
    limits = {"context_tokens": context_tokens, "max_prompt_tokens": context_tokens - 100}
    serving = serving_over(core, tokenizer, model_name="builtin", **limits, **server)
    with live_server(serving, around) as address:
        yield address


@contextmanager
def builtin() -> Iterator[str]:
    """In this process; `TEST_REPLICAS=2` has `gemserve serve --replicas 2` in its place."""
    if REPLICAS in os.environ:
        with replicas(int(os.environ[REPLICAS])) as address:
            yield address
        return
    core = build_core(ModelConfig(device="cpu"), EngineConfig(kv_memory_bytes=1 << 28))
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    with live_server(serving) as address:
        yield address


@contextmanager
def replicas(count: int) -> Iterator[str]:
    """The built-in model on so many replicas, all of which take requests."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--replicas", str(count), "--device", "cpu", "--kv-memory", "256MiB"]
        server = ServeProcess(options, Path(folder) / "log")
        try:
            server.wait_until_ready(START_S)
            wait_for(lambda: _num_ready(server.url) == count, START_S)
            yield server.url
        finally:
            server.stop(STOP_S)


def _num_ready(url: str) -> int:
    metrics = httpx.get(f"{url}/metrics", timeout=20).text
    found = re.search(r"^gemserve_replicas_ready (\d+)", metrics, re.MULTILINE)
    return int(found[1]) if found else 0
