"""What a runner asks where several ranks run the same steps, and must do the same in each.

Ranks meet in every layer, where the outputs of their heads are summed. So all of them must pause a
pass at the same place, and go on with the same tokens. Rank 0 decides what depends on a clock, or
on numbers that could differ in the last digit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Lockstep(Protocol):
    """`draws_tokens`: whether this runner's tokens are used. It is true of rank 0 only."""

    @property
    def draws_tokens(self) -> bool: ...

    def decide(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, where alone it is called. Raises what it raises there."""

    def all_heads(self, of_rank: torch.Tensor) -> torch.Tensor:
        """On rank 0 the rows [heads, …] of all ranks' heads. Elsewhere only the rank's own."""


class Alone:
    """The lockstep of a runner that has the whole model."""

    draws_tokens = True

    def decide(self, make: Callable[[], T]) -> T:
        return make()

    def all_heads(self, of_rank: torch.Tensor) -> torch.Tensor:
        return of_rank


ALONE = Alone()
