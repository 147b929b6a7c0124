"""One heap for all threads of the process, which gives back what it does not need."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress

_M_ARENA_MAX = -8  # of glibc's malloc.h
_TRIM_S = 60.0


def use_one_heap() -> None:
    """Let glibc serve all threads from one heap, and give back its free pages each minute.

    Else it has a heap for each thread, and each keeps what it once had at its most: resident memory
    grew for hours, while what was in use did not. Call it before threads allocate. The number of
    heaps is left to `MALLOC_ARENA_MAX` if that is set. Other C libraries have no such heaps.
    """
    with suppress(AttributeError, OSError, TypeError):  # no glibc
        libc = ctypes.CDLL(None)
        trim = libc.malloc_trim
        if "MALLOC_ARENA_MAX" not in os.environ:
            libc.mallopt(_M_ARENA_MAX, 1)
        threading.Thread(target=_trim, args=[trim], name="gemserve-heap", daemon=True).start()


def _trim(trim: ctypes._NamedFuncPointer) -> None:
    """Each time takes a millisecond, and a third of one for each MiB that it gives back."""
    while True:
        time.sleep(_TRIM_S)
        trim(0)
