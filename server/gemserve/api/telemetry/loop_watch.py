"""Notices when the event loop is held up, and says by what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from contextlib import suppress

log = logging.getLogger("gemserve.api")
BOUND_S = 0.1  # a stall beyond this is logged
_BEAT_S = 0.02
_WAITING = "in select"  # the place of a loop that has nothing to do
_PAUSE_S = 10.0  # between two lines about the same place
_MOST_PLACES = 256


class LoopWatch:
    """Measures how late the event loop's heartbeat is, and looks at the loop's stack meanwhile.

    A thread looks, because a loop that is held up cannot. If the thread itself comes late, the
    whole process was starved or the interpreter lock was held by a call that is not Python's: the
    stall counts, and the line says so. The line has the processor time of the loop's thread, too,
    which tells work on the loop from a busy machine.
    """

    def __init__(self, bound_s: float = BOUND_S) -> None:
        self._bound_s = bound_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._beat_s = self._worked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._longest_s = 0.0
        self._seen: tuple[float, str] | None = None  # the beat that was late, and the stack
        self._logged_s: dict[str, float] = {}  # by place
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running event loop."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._beat_s, self._worked_s = time.monotonic(), time.thread_time()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)
        threading.Thread(target=self._watch, name="gemserve-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more. To be called on the event loop. Idempotent."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def take_longest_s(self) -> float:
        """The longest stall since this was asked last, in seconds."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _beat(self) -> None:
        now_s = time.monotonic()
        late_s = now_s - self._beat_s - _BEAT_S
        self._longest_s = max(self._longest_s, late_s)
        worked_s = time.thread_time()
        if late_s > self._bound_s:
            self._report(late_s, worked_s - self._worked_s)
        self._beat_s, self._worked_s = now_s, worked_s
        assert self._loop is not None
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            beat_s = self._beat_s
            # half the bound, so that there is a stack of every stall that is logged
            if time.monotonic() - beat_s > _BEAT_S + self._bound_s / 2:
                frame = sys._current_frames().get(self._loop_thread)
                if frame is not None and (self._seen is None or self._seen[0] != beat_s):
                    with suppress(AttributeError):  # the frame may end while it is looked at
                        self._seen = beat_s, "".join(traceback.format_stack(frame))

    def _report(self, late_s: float, worked_s: float) -> None:
        stack = ""
        if self._seen is not None and self._seen[0] == self._beat_s:
            stack = self._seen[1]
        place = "\n".join(stack.splitlines()[-2:])
        now_s = time.monotonic()
        if now_s - self._logged_s.get(place, float("-inf")) < _PAUSE_S:
            return
        if len(self._logged_s) >= _MOST_PLACES:
            self._logged_s.clear()
        self._logged_s[place] = now_s
        if worked_s < late_s / 10 and (_WAITING in place or not place):
            log.warning(
                "the event loop could not run for %.0f ms while it did next to nothing itself: "
                "the machine, or another thread, was busy",
                late_s * 1000,
            )
            return
        log.warning(
            "the event loop was held up for %.0f ms (%.0f ms of its own work), by: %s\n%s",
            late_s * 1000,
            worked_s * 1000,
            place or "unknown: no thread of Python's ran",
            stack,
        )
