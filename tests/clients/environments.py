"""Clients' own environments, which `make test-clients` installs under .venv-clients."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / ".venv-clients"
HOW = "`make test-clients` installs it"


def script_of(name: str, script: str) -> str:
    """A script of the client's environment; skips the test where there is none."""
    path = ROOT / name / "bin" / script
    if not path.exists():
        pytest.skip(f"{name}: {HOW}")
    return str(path)


def python_of(name: str) -> tuple[str, ...]:
    return (script_of(name, "python"), "-c")
