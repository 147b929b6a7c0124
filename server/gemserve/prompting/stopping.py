"""Work on a text that stops between two slices when nobody waits for it any more.

A call of the tokenizer cannot be interrupted, so the work asks before each of its calls. The answer
is in a context variable, which a thread inherits from whoever started it: it is asked deep within
functions that know nothing of clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_stops: ContextVar[Event | None] = ContextVar("stops", default=None)


class Stopped(Exception):
    """The work has ended early, because it was stopped."""


@contextmanager
def stoppable_by(event: Event) -> Iterator[None]:
    """What is begun in this block, in threads too, stops once the event is set."""
    token = _stops.set(event)
    try:
        yield
    finally:
        _stops.reset(token)


def check_stopped() -> None:
    """Raise `Stopped` if this work is stopped. Cheap; call it before each slice."""
    event = _stops.get()
    if event is not None and event.is_set():
        raise Stopped
