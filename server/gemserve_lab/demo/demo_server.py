"""Runs `gemserve serve` as a child process, and streams one answer from it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.ending_signals import ending_signals_held

START_TIMEOUT_S = 900.0  # a model without a calibration is calibrated first
ANSWER_TIMEOUT_S = 300.0
# what the reader should know of all that the server writes when it starts
_STARTUP_LINES = re.compile(
    r"^(?:gemserve: (?:this model is not calibrated|calibrat|warning: )|INFO: +decode steps run)"
    r".*$",
    re.MULTILINE,
)
_LEVEL = re.compile(r"^INFO: +")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer as the client received it. `report`: the reply's `filter` object."""

    text: str
    ttft_s: float
    report: dict[str, Any]
    peak_kv_bytes: float
    decode_kv_bytes: float


class Server:
    """A server of one model on a free port. `stop` ends it, whether it was started or not."""

    def __init__(self, directory: Path, model: str) -> None:
        self._log = directory / "server.log"
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def start(self) -> None:
        """Start it, and wait until it answers. Raises `SystemExit` with its log if it does not."""
        port = self._url.rsplit(":", 1)[1]
        words = ["serve", "--model", self._model, "--port", port]
        print(f"$ gemserve {' '.join(words)}", flush=True)
        # a signal before the process is held would leave it behind
        with self._log.open("wb") as log, ending_signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gemserve.cli.main", *words],
                stdout=log,
                stderr=log,
                env=_environment(),
            )
        if not self._is_ready(self._process):
            raise SystemExit(f"the server did not start:\n{self._log.read_text()}")

    def stop(self) -> None:
        """Idempotent. A second signal cannot come before the server has been told to end."""
        if self._process is None:
            return
        with ending_signals_held():
            self._process.terminate()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def ask(self, content: str, method: str | None, max_tokens: int) -> Result:
        """Stream one greedy answer, printing it on one line."""
        chosen: dict[str, Any] = {"return_selection": True}
        if method is not None:
            chosen["method"] = method
        before = self._kv_bytes()
        started_s = time.monotonic()
        ttft_s = 0.0
        text = ""
        report: dict[str, Any] = {}
        for chunk in self._chunks(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": max_tokens,
                "stream": True,
                "filter": chosen,
            }
        ):
            report = report or chunk.get("filter", {})
            delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if delta:
                ttft_s = ttft_s or time.monotonic() - started_s
                text += delta
                print(delta.replace("\n", " "), end="", flush=True)
        print()
        after = self._kv_bytes()
        return Result(
            text=text,
            ttft_s=ttft_s or time.monotonic() - started_s,
            report=report,
            peak_kv_bytes=after["peak"] - before["peak"],
            decode_kv_bytes=after["decode"] - before["decode"],
        )

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed chat completion."""
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _open(request, ANSWER_TIMEOUT_S) as reply:
            for line in reply:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data and data != line.strip():
                    yield json.loads(data)
        raise SystemExit("the server ended its answer early: see its log")

    def _is_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers. Print what it says about a calibration."""
        shown = 0
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            lines = _STARTUP_LINES.findall(self._log.read_text(errors="replace"))
            for line in lines[shown:]:
                print(f"  {_LEVEL.sub('', line)}", flush=True)
            shown = len(lines)
            try:
                _open(f"{self._url}/ready", 5).close()
                return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        return False

    def _kv_bytes(self) -> dict[str, float]:
        with _open(f"{self._url}/metrics", 10) as reply:
            text = reply.read().decode()
        sums = {"peak": 0.0, "decode": 0.0}
        pattern = r'^gemserve_request_kv_cache_bytes_sum\{stage="(\w+)"\} (\S+)$'
        for stage, value in re.findall(pattern, text, re.MULTILINE):
            sums[stage] = float(value)
        return sums


def _open(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """A reply of the server. A proxy that the environment names would not reach it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout_s)


def _environment() -> dict[str, str]:
    """Without the settings of another server: keys, a host, a filter."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GEMSERVE_")}
    return {**kept, "HF_HUB_OFFLINE": "1"}
