"""Tests of the API once more, through the relay: see `behind_ingress`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "api"
FILES = ("anthropic", "choices_of_keys", "documents", "failures", "quota_endings", "replies")


@pytest.mark.slow
def test_replies_through_the_relay_are_those_of_one_server() -> None:
    files = [str(FOLDER / f"test_{name}.py") for name in FILES]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.replicas.behind_ingress", *files],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-5000:]
