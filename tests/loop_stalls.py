"""Makes tests fail in which a server's event loop works for too long in one go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gemserve.api.telemetry.loop_watch import LoopWatch

# Processor time of the loop's thread between two heartbeats. Unlike the time on the clock, it does
# not grow when other programs have the processor, so the promise itself can be the limit.
LONGEST_S = 0.1


@contextmanager
def no_stalls() -> Iterator[list[str]]:
    """Meanwhile no event loop of this process may stall. Yields what is found, as it is found."""
    stalls: list[str] = []
    gc.freeze()  # what earlier tests of this process have left; looking through it takes 0.3 s
    original = LoopWatch._report

    def report(watch: LoopWatch, late_s: float, worked_s: float) -> None:
        if worked_s >= LONGEST_S:
            stack = "" if watch._seen is None else watch._seen[1]
            stalls.append(f"{worked_s:.3f} s of work on an event loop:\n{stack}")
        original(watch, late_s, worked_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopWatch, "_report", report)
        try:
            yield stalls
        finally:
            gc.unfreeze()
    assert not stalls, "\n".join(stalls)
