"""Sends pickled data between two processes that trust each other, over inherited files."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(pipe: Connection, *message: Any) -> None:
    """Send a message. Raises `OSError` if the other process has ended."""
    # plain pickle: multiprocessing's own would send tensors as files of shared memory
    pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(pipe: Connection) -> Any:
    """The next message. Raises `EOFError` or `OSError` if the other process has ended."""
    return pickle.loads(pipe.recv_bytes())
