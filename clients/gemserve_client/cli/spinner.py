"""Shows on a terminal what a command waits for, and for how many seconds it has waited."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PERIOD_S = 0.1


@contextmanager
def waiting(title: str) -> Iterator[Callable[[str], None]]:
    """Show `title` and the elapsed seconds on a terminal until the end. Elsewhere show nothing.

    The function that it gives changes the title.
    """
    titles = [title]
    if not sys.stderr.isatty():
        yield titles.append
        return
    began_s = time.monotonic()
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(_PERIOD_S):
            line = f"{titles[-1]} {time.monotonic() - began_s:.1f} s"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield titles.append
    finally:
        ended.set()
        drawing.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
