"""One heap for all threads of the process."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # of glibc's malloc.h


def use_one_heap() -> None:
    """Let glibc serve all threads from one heap, unless `MALLOC_ARENA_MAX` says otherwise.

    It gives each thread a heap of its own, and each keeps what it once had at its most: resident
    memory grew for hours, while what was in use did not. Call it before threads allocate. Other C
    libraries have no such heaps.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    with suppress(AttributeError, OSError, TypeError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
