"""Tests of the API once more, through the relay: see `behind_ingress`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMES = ("choices_of_keys", "documents", "failures", "quota_endings", "replies")
FILES = (*(f"api/test_{name}.py" for name in NAMES), "dialects/test_anthropic.py")


@pytest.mark.slow
def test_replies_through_the_relay_are_those_of_one_server() -> None:
    files = [str(TESTS / name) for name in FILES]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.fleet.behind_ingress", *files],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-5000:]
