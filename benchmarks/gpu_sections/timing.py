"""How long a device takes for single operations: by CUDA events, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 1 << 30


class Watch:
    """Times what the device does from here to `stop`. Read it later, so that nothing waits."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float:
        start, stop = self._marks
        if not self._is_cuda:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop) / 1e3)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def median_s(act: Callable[[], Any], device: str, *, repeats: int, warm_up: int = 2) -> float:
    """Median seconds of `act`. Before each run other data takes the place of its data in caches."""
    if device != "cuda":
        warm_up, repeats = 0, 1  # a CPU runs this only as a dry run, whose times mean nothing
    for _ in range(warm_up):
        act()
    # writing it empties the cache, and keeps the device busy while the host launches `act`
    scratch = torch.empty(_FLUSH_BYTES if device == "cuda" else 0, dtype=torch.int8, device=device)
    watches: list[Watch] = []
    for _ in range(repeats):
        scratch.zero_()
        watch = Watch(device)
        act()
        watch.stop()
        watches.append(watch)
    return statistics.median(watch.seconds() for watch in watches)
