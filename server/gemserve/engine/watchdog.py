"""Notices an engine that has work and makes no progress: a step that hangs. No torch."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback

from gemserve.engine.worker import Engine

log = logging.getLogger("gemserve.engine")
EXIT_STATUS = 70  # EX_SOFTWARE, by which a supervisor knows why the process has ended
_LONGEST_TICK_S = 1.0
_LAST_WORDS_S = 1.0  # in which clients get their last events before the process ends


class Watchdog:
    """Says for how long an engine's worker has been in one turn, beyond `limit_s` that it is stuck.

    A turn of the worker is a step, with all that comes in before it. A thread of the watchdog's own
    counts its ticks in which the turn has not changed. So time in which the whole process was
    stopped or starved is not held against the engine. With `ends_process` a stuck engine's requests
    get an error each, and the process ends with `EXIT_STATUS`.
    """

    def __init__(self, engine: Engine, limit_s: float, *, ends_process: bool = False) -> None:
        assert limit_s > 0
        self.limit_s = limit_s
        self.stalled_s = 0.0
        self._engine = engine
        self._ends_process = ends_process
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
            if self._ends_process:
                self._end_process()
        elif was_stuck and not self.is_stuck:
            log.warning("the engine goes on")

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._stopped.set()
        self._thread.join(_LAST_WORDS_S)

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

    def _end_process(self) -> None:
        log.critical("the process ends with status %d (--watchdog-exit)", EXIT_STATUS)
        self._engine.abandon(f"it is stuck: {self.complaint}")
        time.sleep(_LAST_WORDS_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)  # the stuck thread would keep an ordinary exit waiting
