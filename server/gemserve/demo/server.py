"""Runs `gemserve serve` as a child process, and streams one answer from it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 900.0  # a model without a calibration is calibrated first
ANSWER_TIMEOUT_S = 300.0
_STARTUP_LINES = re.compile(
    r"^gemserve: (?:this model is not calibrated|calibrat|warning: ).*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer as the client received it. `report`: the reply's `filter` object."""

    text: str
    ttft_s: float
    report: dict[str, Any]
    peak_kv_bytes: float
    decode_kv_bytes: float


class Server:
    """A server of one model on a free port, until the context ends."""

    def __init__(self, directory: Path, model: str) -> None:
        self._log = directory / "server.log"
        self._model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> Server:
        import openai

        port = self._url.rsplit(":", 1)[1]
        words = ["serve", "--model", self._model, "--port", port]
        print(f"$ gemserve {' '.join(words)}", flush=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gemserve.cli.main", *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        self._client = openai.OpenAI(
            base_url=f"{self._url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0
        )
        if self._is_ready():
            return self
        self.__exit__()
        raise SystemExit(f"the server did not start:\n{self._log.read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, content: str, method: str | None, max_tokens: int) -> Result:
        """Stream one greedy answer through the `openai` client, printing it on one line."""
        chosen: dict[str, Any] = {"return_selection": True}
        if method is not None:
            chosen["method"] = method
        before = self._kv_bytes()
        started_s = time.monotonic()
        ttft_s = 0.0
        text = ""
        report: dict[str, Any] = {}
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"filter": chosen},
        )
        for chunk in stream:
            report = report or (chunk.model_extra or {}).get("filter", {})
            delta = chunk.choices[0].delta.content if chunk.choices else None
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

    def _is_ready(self) -> bool:
        """Wait until the server answers. Print what it says about a calibration."""
        shown = 0
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            lines = _STARTUP_LINES.findall(self._log.read_text(errors="replace"))
            for line in lines[shown:]:
                print(f"  {line}", flush=True)
            shown = len(lines)
            try:
                urllib.request.urlopen(f"{self._url}/ready", timeout=5).close()
                return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        return False

    def _kv_bytes(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        sums = {"peak": 0.0, "decode": 0.0}
        pattern = r'^gemserve_request_kv_cache_bytes_sum\{stage="(\w+)"\} (\S+)$'
        for stage, value in re.findall(pattern, text, re.MULTILINE):
            sums[stage] = float(value)
        return sums
