"""The result of a benchmark as one line: name, device, commit, versions and rows."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def result(
    name: str,
    device: str | None,
    versions: Mapping[str, str | None],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The object that a benchmark prints as its last line."""
    return {
        "benchmark": name,
        "device": device,
        "commit": commit(),
        "versions": {**versions, "python": platform.python_version()},
        "rows": list(rows),
    }


def line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)


def versions(*distributions: str) -> dict[str, str | None]:
    return {name: metadata.version(name) for name in distributions}


def commit() -> str:
    """The commit of the repository that holds this file.

    It ends with "-dirty" if there are changes, and is "unknown" outside of a repository.
    """
    root = Path(__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
