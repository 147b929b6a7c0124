"""What every filter method is: evidence in, positions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gemserve.types import FilterParams, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the filter layer showed of one prompt.

    `queries`: [heads, window, head_dim], its last rows; `keys`: [kv_heads, tokens, head_dim], all
    of them; both post-RoPE. `scale` and `softcap` are those of the layer's own attention.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None
    protected: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])


class Selector(Protocol):
    """Chooses exactly `keep` of the prompt's positions."""

    def window(self, num_tokens: int) -> int:
        """How many of the prompt's last queries `select` wants to see."""
        ...

    def select(self, evidence: Evidence, keep: int, params: FilterParams) -> torch.Tensor:
        """Kept positions, ascending: [keep], int64. `keep` is below the number of tokens."""
        ...
