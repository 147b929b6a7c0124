"""A process that reads one file, with limits on time, memory and output.

A file of another format is a program that draws pages or unpacks itself. A hostile one can be small
and keep a reader busy for hours, so no thread of the server reads one.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

from gemserve.errors import PdfsBusy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLimits:
    """`cpu_s`: seconds of processor time. `wall_s`: with fewer of these, a processor is missing.

    `text_bytes`: of the text as UTF-8. `pages`: of PDFs. `unpacked_bytes`: of what a `.gz` has
    packed; 0: as many as a file may have.
    """

    text_bytes: int
    pages: int = 5000
    cpu_s: int = 60
    wall_s: float = 240.0
    memory_bytes: int = 1 << 30
    unpacked_bytes: int = 0

    @property
    def reason_costly(self) -> str:
        """Why there is no text of a file that takes more time or memory."""
        return (
            f"takes too much to read; the limits are {self.cpu_s} s of processor time and "
            f"{self.memory_bytes >> 20} MiB of memory"
        )


class Reading:
    """The process that reads one file, which may be ended from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._is_ended:
                process.kill()

    def end(self) -> None:
        """Nobody wants the text any more. Idempotent; it may come before `begin`."""
        with self._lock:
            self._is_ended = True
            if self._process is not None:
                self._process.kill()


def run_reader(
    module: str, given: tuple[object, ...], content: bytes, wall_s: float, reading: Reading | None
) -> tuple[int, bytes]:
    """Run `module` on what a file has. Return its exit status, and what it wrote to stdout.

    `given`: its arguments. It blocks for at most `wall_s` seconds, then raises `PdfsBusy`. If
    `reading` is ended, it returns soon.
    """
    command = [sys.executable, "-P", "-m", module, *map(str, given)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        (reading or Reading()).begin(process)
        try:
            output, _ = process.communicate(content, timeout=wall_s)
        except subprocess.TimeoutExpired as error:
            raise PdfsBusy(f"the machine was too busy to read one within {wall_s:g} s") from error
        finally:
            process.kill()
    return process.returncode, output


def limit_this_process(cpu_s: int, memory_bytes: int) -> None:
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # answers go first
