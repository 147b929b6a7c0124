"""A chunk's forward pass that can pause in any layer and be resumed later.

Large chunks keep the processor busy; short steps keep streams fluent and cancellations quick. So a
pass is a coroutine. In every layer the attention function calls `ForwardContext.pause`, several
times if the prompt is long. There the pass hands control back once its time is up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from greenlet import getcurrent, greenlet

from gemserve.engine.running.lockstep import ALONE, Lockstep
from gemserve.model.passes.attention import Breaks


class Pass:
    """Runs `forward(breaks)` in slices, all in one thread. `spent_s`: time taken so far.

    `piece`: see `ForwardContext`. `catch_up`: see `device_queue`. `lockstep`: ranks pause together.
    """

    def __init__(
        self,
        forward: Callable[[Breaks], torch.Tensor | None],
        piece: int,
        catch_up: Callable[[], None],
        lockstep: Lockstep = ALONE,
    ) -> None:
        self._greenlet = greenlet(lambda: forward(Breaks(self._pause, piece)))
        self._catch_up, self._lockstep = catch_up, lockstep
        self._stop_s = 0.0
        self._piece_started_s = 0.0
        self.spent_s = 0.0
        self.result: torch.Tensor | None = None

    def run(self, seconds: float) -> bool:
        """Continue for about `seconds`, at least one piece. Returns True once the pass has ended.

        Raises what the pass raises.
        """
        started_s = self._piece_started_s = time.perf_counter()
        self._stop_s = started_s + seconds
        returned = self._greenlet.switch()
        self.spent_s += time.perf_counter() - started_s
        if self._greenlet.dead:
            self.result = returned
        return self._greenlet.dead

    def abandon(self) -> None:
        """Unwind the pass where it is paused. Idempotent."""
        if self._greenlet:  # it has started and has not ended
            # unwinding restores the modes from before the pass
            with torch.inference_mode():
                self._greenlet.throw()

    def _pause(self) -> None:
        """Hand back control if another piece, as long as the last one, would end too late."""
        self._catch_up()
        if self._lockstep.decide(self._is_time_up):
            parent = getcurrent().parent
            assert parent is not None
            parent.switch()

    def _is_time_up(self) -> bool:
        now = time.perf_counter()
        piece_s = now - self._piece_started_s
        self._piece_started_s = now
        return now + piece_s / 2 >= self._stop_s


def device_queue(device: torch.device) -> Callable[[], None]:
    """A function to call between pieces. It waits until all but the last piece have run.

    A GPU runs a piece after the call that launches it. Without waiting, the clock would measure
    only the launch. Waiting for the last piece as well would leave the GPU idle.
    """
    if device.type != "cuda":
        return lambda: None
    marks: deque[torch.cuda.Event] = deque()

    def catch_up() -> None:
        mark = torch.cuda.Event()
        mark.record()
        marks.append(mark)
        if len(marks) > 1:
            marks.popleft().synchronize()

    return catch_up
