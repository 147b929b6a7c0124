"""`gemserve demo`, as somebody runs it right after `pip install gemserve`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemserve.cli.main import main
from gemserve_lab.commands.demo import MODELS
from gemserve_lab.demo.run import DEMOS


@pytest.mark.slow
def test_it_works_beside_settings_of_another_server_and_without_a_compiler(tmp_path: Path) -> None:
    """Keys of another server made it fail, and a proxy would get the demo's requests."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gemserve.cli.main",
            "demo",
            "--model",
            "builtin",
            "--tokens",
            "3000",
        ],
        env={
            **os.environ,
            "GEMSERVE_API_KEY_FILE": str(tmp_path / "none"),
            "GEMSERVE_FILTER": "none",
            "http_proxy": "http://127.0.0.1:9",
            "CXX": "no-compiler",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  decode steps run layer by layer, which takes longer: the compiler" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["filter:", "none", "right"] in [words[:3] for words in lines]
    assert ["the", "default", "filter", "right"] in [words[:4] for words in lines]


@pytest.mark.parametrize(
    "after_s",
    [
        0.2,
        *(
            pytest.param(after_s, marks=pytest.mark.slow)
            for after_s in (0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0)
        ),
    ],
)
def test_sigterm_leaves_no_server_behind(tmp_path: Path, after_s: float) -> None:
    """The demo's server used to live on, without anybody who would end it."""
    command = [sys.executable, "-u", "-m", "gemserve.cli.main", "demo", "--model", "builtin"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            started = next(line for line in demo.stdout if line.startswith("$ gemserve serve"))
            port = int(started.split()[-1])
            time.sleep(after_s)
            demo.send_signal(signal.SIGTERM)
            assert demo.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            demo.kill()
    assert servers_at(port) == []


def servers_at(port: int) -> list[Path]:
    """The processes that were told this port."""
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [path for path in found if f"--port\0{port}\0" in read_if_there(path)]


def read_if_there(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_the_models_are_those_that_can_be_shown() -> None:
    assert tuple(DEMOS) == MODELS


def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "9"]) == 2
    assert "--tokens=9: must be a whole number, at least 100" in capsys.readouterr().err
