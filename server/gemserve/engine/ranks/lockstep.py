"""Rank 0 decides, and the other ranks hear of it: see `running.lockstep`."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from gemserve.engine.ranks.group import gather_heads
from gemserve.engine.ranks.pipe import receive
from gemserve.engine.ranks.ranks import Ranks

T = TypeVar("T")


class Leader:
    """The lockstep of rank 0."""

    draws_tokens = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def decide(self, make: Callable[[], T]) -> T:
        try:
            value = make()
        except Exception as error:
            self._ranks.send((type(error).__name__, str(error)), None)
            raise
        self._ranks.send(None, value)
        return value

    def all_heads(self, of_rank: torch.Tensor) -> torch.Tensor:
        return gather_heads(of_rank)


class Follower:
    """The lockstep of another rank. `pipe`: to rank 0."""

    draws_tokens = False

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def decide(self, make: Callable[[], T]) -> T:
        error, value = receive(self._pipe)
        if error is not None:
            name, message = error
            raise type(name, (RuntimeError,), {})(message)  # it reads as it does on rank 0
        decided: T = value
        return decided

    def all_heads(self, of_rank: torch.Tensor) -> torch.Tensor:
        return gather_heads(of_rank)
