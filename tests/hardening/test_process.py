"""What the machine does to a server: its clock is set, its terminal is closed, memory is short."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.shared.server_process import ServeProcess
from tests.fakes import COMPLETIONS, FakeCore, serving_over, wait_for
from tests.served import PATIENCE_S, served

DOCUMENTS = "/v1/documents"
TEXT = "The river runs past the houses. " * 40
OPTIONS = [
    *("--kv-memory", "64MiB", "--device", "cpu", "--filter", "none", "--otel", "off"),
    *("--cpu-step", "off"),
]
LONG = {"model": "builtin", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the machine's clock so many seconds forward, or back."""
    real = time.time

    def change(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return change


def test_a_clock_that_is_set_forward_expires_nothing(
    tokenizer: Any, set_clock: Callable[[float], None]
) -> None:
    """All documents of all keys were gone."""
    with served(serving_over(FakeCore(), tokenizer)) as server:
        document = server.ask(DOCUMENTS, text=TEXT, ttl=600)["id"]
        set_clock(3600)
        assert server.get(f"{DOCUMENTS}/{document}").status_code == 200
        assert server.post(COMPLETIONS, prompt="What?", document=document).status_code == 200
        later = server.ask(DOCUMENTS, text=TEXT, ttl=600)
        assert 3500 < later["created_at"] - time.time() + 3600 <= 3601


def test_a_clock_that_is_set_back_keeps_nothing(
    tokenizer: Any, set_clock: Callable[[float], None]
) -> None:
    """Documents stayed longer than was asked for, by as much as the clock was set back."""
    core = FakeCore()
    with served(serving_over(core, tokenizer)) as server:
        document = server.ask(DOCUMENTS, text=TEXT, ttl=1)["id"]
        set_clock(-3600)
        wait_for(lambda: core.forgotten == {document})
        assert server.get(f"{DOCUMENTS}/{document}").status_code == 404


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[ServeProcess]:
    """A process of the built-in model."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")}
    process = ServeProcess([*OPTIONS, *options], folder / "log", {**plain, **environment})
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def listening_to(ending: signal.Signals) -> Iterator[None]:
    """Processes that are started here do not ignore it, even if nohup runs the tests."""
    before = signal.signal(ending, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(ending, before)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_closed_terminal_lets_streams_end(tmp_path: Path) -> None:
    """SIGHUP ended the process, and every stream without its last event."""
    with listening_to(signal.SIGHUP), serving(tmp_path) as process:
        process.wait_until_ready(400)
        body = {**LONG, "stream": True}
        with httpx.stream("POST", process.url + COMPLETIONS, json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGHUP)
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in said[-2]
        assert process.process.wait(PATIENCE_S) == 129
