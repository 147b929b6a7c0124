"""How a process that has an engine treats its threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# After each operation on tensors the engine waits this long for the interpreter lock, if a thread
# of the API prepares a long prompt meanwhile. Python's 5 ms are seconds for a decode step.
_SWITCH_S = 0.0005


def switch_threads_often() -> None:
    """Let the engine's thread run soon when it waits for the interpreter lock."""
    sys.setswitchinterval(_SWITCH_S)


def call_in_new_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread that ends when it returns. Raises what it raises.

    Each thread that computes gets OpenMP threads of its own, which live as long as it does. If
    loading left some behind, the process would have more of them than the machine has cores. Then
    GNU OpenMP lets threads that wait for each other sleep at once, and the engine's steps take
    twice as long.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="gemserve-loading", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
