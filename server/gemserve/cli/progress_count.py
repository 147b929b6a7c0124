"""Says how many of something are done: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 10.0


@contextmanager
def counted(what: str, unit: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total`, which prints on standard error."""
    from tqdm import tqdm

    done, started_s = 0, time.monotonic()
    last_s = started_s
    with tqdm(desc=what, unit=unit, total=total, leave=False, disable=None) as bar:

        def count() -> None:
            nonlocal done, last_s
            done += 1
            bar.update()
            now_s = time.monotonic()
            if bar.disable and now_s - last_s >= _EVERY_S:
                last_s = now_s
                left_s = (now_s - started_s) / done * (total - done)
                print(
                    f"gemserve: {what}: {done:,} of {total:,} {unit}s, about {left_s:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )

        if bar.disable:
            print(f"gemserve: {what}: 0 of {total:,} {unit}s", file=sys.stderr, flush=True)
        yield count
