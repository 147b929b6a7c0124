"""The processes of ranks 1, 2, … as rank 0 sees them: it starts them, and sends them its work.

A replica is one process more for each rank beyond the first. Rank 0 is the server. It alone
schedules, draws tokens and answers. The others get every plan from it and run the same steps.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gemserve.config import ModelConfig
from gemserve.engine.ranks.pipe import receive, send
from gemserve.engine.ranks.summary import StepSummary
from gemserve.errors import RankFailed

log = logging.getLogger("gemserve.engine")
EXIT_STATUS = 70  # EX_SOFTWARE, by which a supervisor knows why the process has ended
STUCK_S = 60.0  # the longest that ranks may need for a step, which usually takes a quarter second
_LAST_WORDS_S = 3.0  # in which clients get their last events, and /health says why
_TICK_S = 0.2


class Ranks:
    """Starts ranks 1 to num_ranks − 1, and watches them.

    If one ends, or a step hangs, `on_fault` is called with the cause, and soon afterwards this
    process ends with `EXIT_STATUS`: ranks cannot be replaced one by one. The others end with it,
    however it ends, because each waits for the end of a pipe that only this process holds.
    """

    def __init__(self, model: ModelConfig, num_ranks: int) -> None:
        self.model, self.num_ranks = model, num_ranks
        self.on_fault: Callable[[str], None] = lambda cause: None
        self._folder = tempfile.mkdtemp(prefix="gemserve-ranks-")  # of this user alone
        self.store = Path(self._folder) / "store"
        self._fault: str | None = None
        self._step: int | None = None  # the number of what the ranks do together now, if anything
        self._steps = count()
        self._held_s = 0.0
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        lifeline, self._lifeline = os.pipe()
        for rank in range(1, num_ranks):
            self._start(rank, lifeline)
        os.close(lifeline)
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="gemserve-ranks", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, *message: Any) -> None:
        """Send all ranks the same message. Raises `RankFailed`."""
        try:
            for pipe in self._pipes:
                send(pipe, *message)
        except OSError as error:
            raise self._failed(f"a rank takes no messages: {error}") from error

    def send_each(self, make: Callable[[int], tuple[Any, ...]]) -> None:
        """Send each rank what `make` returns for it. Raises `RankFailed`."""
        try:
            for rank, pipe in enumerate(self._pipes, 1):
                send(pipe, *make(rank))
        except OSError as error:
            raise self._failed(f"a rank takes no messages: {error}") from error

    def compare(self, leader: StepSummary) -> None:
        """Wait for each rank's summary of a step. Raises `RankFailed` if one does not fit ours."""
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                (found,) = receive(pipe)
            except (EOFError, OSError) as error:
                raise self._failed(f"rank {rank} has ended") from error
            if not found.fits(leader):
                log.error("rank %d came to %s, rank 0 to %s", rank, found, leader)
                raise self._failed(f"rank {rank} has not done what rank 0 has done")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around all that needs other ranks, so that it is noticed if they hang."""
        self._step = next(self._steps)
        try:
            yield
        finally:
            self._step = None

    def stop(self) -> None:
        """End all other ranks. Idempotent."""
        self._stopped.set()
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)  # which ends them, unless they are stopped
        for process in self._processes:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, lifeline: int) -> None:
        ours, theirs = Pipe()
        # -P: what is in the working directory is not imported
        command = [sys.executable, "-P", "-m", "gemserve.engine.ranks.rank_process"]
        files = (theirs.fileno(), lifeline)
        self._processes.append(
            subprocess.Popen([*command, *map(str, files)], pass_fds=files, stdin=subprocess.DEVNULL)
        )
        theirs.close()
        self._pipes.append(ours)
        send(ours, self.model, str(self.store), rank, self.num_ranks)

    def _failed(self, cause: str) -> RankFailed:
        self._fault = self._fault or cause
        return RankFailed(cause)

    def _watch(self) -> None:
        step = None
        while not self._stopped.wait(_TICK_S):
            # ticks are counted, so that time in which all was stopped does not count
            is_same = self._step is not None and self._step == step
            step, self._held_s = self._step, self._held_s + _TICK_S if is_same else 0.0
            cause = self._find_fault()
            if cause is None or self._stopped.is_set():
                continue
            log.critical("%s; this process ends with status %d", cause, EXIT_STATUS)
            with suppress(Exception):
                self.on_fault(cause)
            time.sleep(_LAST_WORDS_S)
            self.stop()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STATUS)  # the worker may wait for the other ranks for ever

    def _find_fault(self) -> str | None:
        for rank, process in enumerate(self._processes, 1):
            status = process.poll()
            if status is not None:
                return f"rank {rank} has ended with status {status}"
        if self._held_s > STUCK_S:
            return f"the {self.num_ranks} ranks have not ended a step for {STUCK_S:.0f} s"
        return self._fault
