"""`gemserve serve` says what is wrong with its settings before it loads anything large."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

_RUN = """
import sys
from gemserve.cli.main import main
code = main(["serve", *sys.argv[1:]])
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-queue=0"], "--max-queue=0"),
        (["--api-key-file=/nowhere/keys"], "/nowhere/keys: cannot be read"),
        (["--adapter=a=b"], "needs adapter_dir"),
        (["--host=203.0.113.1"], "cannot listen there"),
    ],
)
def test_a_wrong_setting_is_found_without_torch(flags: list[str], said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _RUN, *flags], capture_output=True, text=True, timeout=300
    )
    assert run.stdout.split() == ["2", "False"], run.stderr
    assert said in run.stderr


def test_a_signal_while_loading_prints_no_traceback() -> None:
    """SystemExit was raised wherever the import just was, and printed."""
    flags = ["-m", "gemserve.cli.main", "serve", "--port=0", "--calibrate=off"]
    process = subprocess.Popen(
        [sys.executable, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(0.1)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")  # which wings are missing, and then that it loads
    is_loading = any("loading" in line for line in lines)
    os.kill(process.pid, signal.SIGTERM)
    _, rest = process.communicate(timeout=300)
    assert is_loading
    assert "Traceback" not in rest
    assert process.returncode == 143
