"""The device: its clock, its memory, and whether it still answers."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_sections.record import DeviceLost, describe

_FLUSH_BYTES = 1 << 30


class Machine:
    """One CUDA device or, for a dry run, the CPU."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.is_cuda = kind == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_cuda else f"cpu ({platform.machine()})"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal, in the model's dtype unless told."""
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], Any], *, repeats: int, warm_up: int = 2) -> float:
        """Median time of `act`, none of whose data is in a cache."""
        if not self.is_cuda:  # a dry run, whose times mean nothing
            return self._wall_s(act)
        for _ in range(warm_up):
            act()
        # overwritten before each run: that empties the cache, and keeps the device busy while the
        # host launches what is timed
        scratch = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=self.device)
        watches: list[Watch] = []
        for _ in range(repeats):
            scratch.zero_()
            watch = Watch(self)
            act()
            watch.stop()
            watches.append(watch)
        return statistics.median(watch.seconds() for watch in watches)

    def free(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def recover(self) -> None:
        """After a failure: free memory, or raise `DeviceLost` if the device answers no more."""
        try:
            self.synchronize()
            self.free()
            torch.zeros(1, device=self.device).add_(1).item()
        except RuntimeError as error:
            raise DeviceLost(describe(error)) from None

    def available_bytes(self) -> int | None:
        """None: not known."""
        return torch.cuda.mem_get_info()[0] if self.is_cuda else None

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """The most that tensors took since `reset_peak`; None: not known."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else None

    def _wall_s(self, act: Callable[[], Any]) -> float:
        started_s = time.perf_counter()
        act()
        return time.perf_counter() - started_s


class Watch:
    """Times what the device does from its making to `stop`; read later, when that is done."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._marks: list[Any] = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float:
        start, stop = self._marks
        if not self._machine.is_cuda:
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    def _mark(self) -> Any:
        if not self._machine.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
