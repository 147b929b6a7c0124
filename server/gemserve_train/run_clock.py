"""How long a run of training has taken, over all of its parts, and a limit of that time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class RunClock:
    """Counts from where the run was when it was saved last. `path`: the file that keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._before_s = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            self._before_s = 0.0
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._start_s

    def save(self) -> None:
        self._path.write_text(json.dumps({"seconds": self.elapsed_s}) + "\n")


def time_limit(clock: RunClock, limit_s: float) -> Any:
    """A callback of transformers' `Trainer` that evaluates, saves and stops after `limit_s`."""
    from transformers import TrainerCallback

    class TimeLimit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if clock.elapsed_s >= limit_s:
                control.should_evaluate = control.should_save = True
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.save()

    return TimeLimit()
