"""The processes that this one has started, directly or not; on Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36
# a process by its id and the time of its start, because ids are used again
Process = tuple[int, str]


def adopt_orphans() -> None:
    """From now on, processes whose parents have ended become children of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def find_descendants() -> set[Process]:
    """All of them that run now."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent, started = _read(int(folder.name))
            parents[int(folder.name)] = parent, started
    found: set[Process] = set()
    newest = {os.getpid()}
    while newest:
        newest = {pid for pid, (parent, _) in parents.items() if parent in newest}
        found |= {(pid, parents[pid][1]) for pid in newest}
    return found


def end_processes(processes: Iterable[Process], patience_s: float) -> None:
    """Wait until they have ended, and end those that have not after `patience_s`."""
    ends_s = time.monotonic() + patience_s
    left = [process for process in processes if _is_alive(process)]
    while left and time.monotonic() < ends_s:
        time.sleep(_POLL_S)
        left = [process for process in left if _is_alive(process)]
    for pid, _ in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_alive(process: Process) -> bool:
    try:
        return _read(process[0])[1] == process[1]
    except OSError:
        return False


def _read(pid: int) -> tuple[int, str]:
    """The parent of a process, and when it started. Raises `OSError` if it has ended."""
    # the command's name, in brackets, may have spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] == "Z":
        raise ProcessLookupError(pid)
    return int(fields[1]), fields[19]
