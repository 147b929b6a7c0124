"""One line on a terminal that says how much of a prompt is read."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemserve.engine.sequence.progress import Progress

_PERIOD_S = 0.25
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Rewrites its line on standard error, if that is a terminal. Elsewhere it shows nothing."""

    def __init__(self) -> None:
        self._is_shown = False
        self._shown_s = 0.0

    def show(self, progress: Progress) -> None:
        """Show the progress, but not more often than anyone can read it."""
        now_s = time.monotonic()
        if not sys.stderr.isatty() or now_s - self._shown_s < _PERIOD_S:
            return
        self._is_shown, self._shown_s = True, now_s
        print(f"{_CLEAR}{text_of(progress)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line. Idempotent."""
        if self._is_shown:
            self._is_shown = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def text_of(progress: Progress) -> str:
    share = progress.tokens / max(1, progress.total)
    verb = "filtering" if progress.phase == "filter" else "reading"
    left = "" if progress.eta_s is None else f", about {progress.eta_s:.0f} s left"
    return f"{verb}: {progress.tokens:,} of {progress.total:,} tokens ({share:.0%}){left}"
