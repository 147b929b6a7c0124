"""What every filter method is: evidence in, a choice of positions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gemserve.types import Budget, FilterParams, Span
from gemserve_kernels import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the filter layer showed of one prompt.

    `queries`: [heads, window, head_dim], its last rows; `keys`: [kv_heads, tokens, head_dim], all
    of them; both post-RoPE. `scale` and `softcap` are those of the layer's own attention;
    `protected` and `code_blocks` are the request's. `backend`: the operations of the machine that
    queries and keys are on.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None
    backend: Backend
    protected: tuple[Span, ...]
    code_blocks: tuple[tuple[int, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a method keeps. `positions`: ascending, [kept], int64.

    `coverage`: the share, 0 to 1, of the most focused head's attention to the document that the
    kept tokens get (within the budget, if it was widened); None if the method does not tell.
    `is_diffuse`: that was too little. `has_failed`: it is everything, for want of a choice.
    """

    positions: torch.Tensor
    coverage: float | None = None
    is_diffuse: bool = False
    has_failed: bool = False


def finite(scores: torch.Tensor) -> torch.Tensor:
    """`scores` as they are. Raises `ValueError` if one is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        raise ValueError("the filter layer's scores are not finite")
    return scores


class Selector(Protocol):
    """Chooses which of the prompt's positions to keep."""

    def window(self, num_tokens: int) -> int:
        """How many of the prompt's last queries `select` wants to see."""
        ...

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        """Positions within `budget`, whose `high` is below the number of tokens.

        Raises `ValueError` if the scores are not finite.
        """
        ...
