"""What a section finds, written to its file after every row, so that nothing measured is lost.

A row is measured, failed or skipped, and says why; figures carry their units. No torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = Mapping[str, tuple[float | None, str]]  # by name: value and unit
OUT_OF_TIME = "skipped: out of time"


class OutOfTime(Exception):
    """Raised within a measurement that goes on for longer than its section may."""


class DeviceLost(Exception):
    """The device answers nothing any more: only another process can use it."""


class Record:
    """One section's rows, status and time.

    `limit_s`: how long it may take, from now on. `origin`: what its figures are of: commit, device.
    `recover`: called after a failure; frees memory, or raises `DeviceLost`.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit_s: float,
        origin: Mapping[str, Any],
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._recover, self._limit_s = path, recover, limit_s
        self._started_s = time.time()
        self._rows: dict[str, dict[str, Any]] = {}
        self._state: dict[str, Any] = {
            "section": path.stem,
            "status": "running",
            "reason": None,
            "origin": dict(origin),
            "started_unix": figure(self._started_s, "s"),
            "limit": figure(limit_s, "s"),
        }
        self._write()

    @property
    def left_s(self) -> float:
        return self._started_s + self._limit_s - time.time()

    def check_time(self) -> None:
        """Raise `OutOfTime` once the section's time is used up."""
        if self.left_s <= 0:
            raise OutOfTime

    def add(self, labels: Mapping[str, Any], figures: Figures) -> None:
        """A measured row; it takes the place of an earlier one with these labels."""
        made = {name: figure(*of) for name, of in figures.items()}
        self._put(labels, {"status": "measured", "reason": None, "figures": made})

    def skip(self, labels: Mapping[str, Any], reason: str) -> None:
        self._put(labels, {"status": "skipped", "reason": reason, "figures": {}})

    def attempt(
        self,
        labels: Mapping[str, Any],
        measure: Callable[[], Figures],
        *,
        expected_s: float = 0.0,
    ) -> bool:
        """Add a row of what `measure` returns, or of why it does not; True if it has.

        Not even tried if it is expected to end too late. Raises `DeviceLost`.
        """
        if self.left_s <= expected_s:
            self.skip(labels, OUT_OF_TIME)
            return False
        print(f"{self._path.stem}: {dict(labels)}", file=sys.stderr, flush=True)
        try:
            self.add(labels, measure())
        except OutOfTime:
            self.skip(labels, OUT_OF_TIME)
        except Exception as error:
            reason = describe(error)
            # its frames hold the tensors that may have been too many
            error.with_traceback(None)
            self._put(labels, {"status": "failed", "reason": reason, "figures": {}})
        else:
            return True
        self._recover()
        return False

    def finish(self, status: str, reason: str | None = None) -> None:
        took = figure(time.time() - self._started_s, "s")
        self._state |= {"status": status, "reason": reason, "took": took}
        self._write()

    def _put(self, labels: Mapping[str, Any], row: dict[str, Any]) -> None:
        self._rows[json.dumps(labels, sort_keys=True)] = {"labels": dict(labels), **row}
        self._write()

    def _write(self) -> None:
        write_json(self._path, self._state | {"rows": list(self._rows.values())})


def figure(value: float | None, unit: str) -> dict[str, Any]:
    """JSON has no NaN and no infinity: such a value is null, and told apart by `not_finite`."""
    if value is not None and not math.isfinite(value):
        return {"value": None, "unit": unit, "not_finite": str(value)}
    return {"value": value, "unit": unit}


def describe(error: BaseException) -> str:
    """Of errors with pages of text, such as a compiler's, the beginning and the end."""
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= 1500 else f"{text[:900]} […] {text[-500:]}"


def write_json(path: Path, content: Any) -> None:
    """At once: whoever reads it meanwhile gets the old or the new."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False))
    os.replace(part, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
