"""Ctrl-C and SIGTERM as one exception, for commands that keep what they have done by then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)


class EndedBySignal(KeyboardInterrupt):
    """`number`: of the signal. The exit status is 128 more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `EndedBySignal` where one of both signals comes. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_signals_held() -> Iterator[None]:
    """Raise what comes meanwhile behind the block: nothing in it is left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _end(number: int, _: FrameType | None) -> None:
    raise EndedBySignal(number)
