"""The process of `gemserve serve`: it says that it loads, ends in order, and survives `kill -9`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.fakes import COMPLETIONS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "robustness" / "kill_server.py"
LONG = {"model": "builtin", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.timeout(1200)  # a start takes minutes on a machine that is very busy
def test_a_process_tells_its_states_and_ends_streams_before_it_ends() -> None:
    """Nothing listened while a model was loaded, and a second SIGINT cut streams off."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--port", str(port), "--kv-memory", "64MiB", "--device", "cpu"]
    words += ["--filter", "none"]
    url, said = f"http://127.0.0.1:{port}", set[str]()
    process = subprocess.Popen(
        [sys.executable, "-m", "gemserve.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")},
    )
    try:
        ends_s = time.monotonic() + 900
        while process.poll() is None and time.monotonic() < ends_s and "ok" not in said:
            try:
                said.add(httpx.get(f"{url}/ready", timeout=10).json()["status"])
            except httpx.TransportError:
                time.sleep(0.05)
        assert said == {"loading", "ok"}
        body = {**LONG, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while (ready := httpx.get(f"{url}/ready", timeout=10)).status_code == 200:
                assert time.monotonic() < ends_s
            assert ready.json()["status"] == "shutting down"
            process.send_signal(signal.SIGINT)
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == "cancelled"
        assert process.wait(60) != 0
        assert process.stdout is not None
        with process.stdout as written:
            assert f"gemserve: ready: open {url}/ in a browser" in written.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(7200)
@pytest.mark.skipif("GEMSERVE_TEST_KILLS" not in os.environ, reason="each start takes seconds")
def test_the_start_after_a_kill_is_clean_and_its_answers_right() -> None:
    """GEMSERVE_TEST_KILLS=50 kills as often, each time at another moment."""
    kills = os.environ["GEMSERVE_TEST_KILLS"]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", kills, "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=7000,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])
    assert outcome["faults"] == 0
    assert outcome["answers"] >= 4
