"""A file of finished runs, a line for each, so that what is there need not be done again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The finished runs. A line that was cut off when a run was stopped is left out."""
    runs = []
    # splitlines would also split at U+2028 and others, which an answer may contain
    for line in path.read_text().split("\n") if path.exists() else []:
        try:
            runs.append(json.loads(line))
        except ValueError:
            continue
    return runs


def append_run(path: Path, run: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        # a line that was cut off before stays a line of its own
        file.write("\n" + json.dumps(run, ensure_ascii=False) + "\n")


def find_run(runs: Sequence[dict[str, Any]], key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run that has all values of `key`."""
    return next((r for r in runs if all(r.get(n) == value for n, value in key.items())), None)
