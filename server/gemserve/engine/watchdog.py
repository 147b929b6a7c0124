"""Notices an engine that has work and makes no progress: a step that hangs. No torch."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from gemserve.engine.worker import Engine

log = logging.getLogger("gemserve.engine")
_LONGEST_TICK_S = 1.0
_LONGEST_STOP_S = 1.0


class Watchdog:
    """Says for how long an engine's worker has been in one turn, beyond `limit_s` that it is stuck.

    A turn of the worker is a step, with all that comes in before it. A thread of the watchdog's own
    counts its ticks in which the turn has not changed. So time in which the whole process was
    stopped or starved is not held against the engine. The process goes on, because the step may end
    after all: `/health` fails, and who has probes decides.
    """

    def __init__(self, engine: Engine, limit_s: float) -> None:
        assert limit_s > 0
        self.limit_s = limit_s
        self.stalled_s = 0.0
        self._engine = engine
        self._tick_s = min(_LONGEST_TICK_S, limit_s / 10)
        self._turn: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gemserve-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        return self.stalled_s >= self.limit_s

    @property
    def complaint(self) -> str:
        """What is wrong with a stuck engine."""
        return (
            f"no step has ended for {self.stalled_s:.0f} s, although there is work; "
            f"--watchdog allows {self.limit_s:g} s"
        )

    def look(self, passed_s: float) -> None:
        """Count `passed_s` since the last look, at most two ticks of it."""
        was_stuck, turn = self.is_stuck, self._engine.turn
        is_same = turn is not None and turn == self._turn
        passed_s = min(passed_s, 2 * self._tick_s)
        self._turn, self.stalled_s = turn, self.stalled_s + passed_s if is_same else 0.0
        if self.is_stuck and not was_stuck:
            log.critical("the engine is stuck: %s\n%s", self.complaint, self._stack())
        elif was_stuck and not self.is_stuck:
            log.warning("the engine goes on")

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._stopped.set()
        self._thread.join(_LONGEST_STOP_S)

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._stopped.wait(self._tick_s) and self._engine.death is None:
            now_s = time.monotonic()
            self.look(now_s - last_s)
            last_s = now_s
        self.stalled_s = 0.0  # a dead engine is no longer stuck

    def _stack(self) -> str:
        """Where the worker is. Frames have code and no data, so no text of a prompt."""
        frame = sys._current_frames().get(self._engine.thread_id)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
