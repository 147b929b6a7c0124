"""The interface of a filter method that looks at the prompt: evidence in, positions out.

A new method is one file with one `score`, and a line in `filtering.methods`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gemserve.filter_plan import Budget
from gemserve.types import NO_BREAKS, FilterParams, ProtectedRange, TextBreaks
from gemserve_kernels import Backend

Heads = tuple[tuple[int, int], ...]  # (layer, head) pairs
TokenRange = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEvidence:
    """One layer's queries [heads, rows, head_dim] and keys [kv_heads, read, head_dim], post-RoPE.

    `scale` and `softcap` are those of the layer's own attention. `move_keys`: gives keys [heads,
    tokens, head_dim] as they would be that many positions [tokens] further on; None where the
    layer does not rotate keys by their positions.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None
    move_keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def keys_near(self, keys: torch.Tensor, rows: Sequence[int], ceiling: int) -> torch.Tensor:
        """`keys` as if none stood more than `ceiling` positions before the rows that look.

        Heads that find what is asked for may lose it over distances that they were not trained on.
        The ceiling on distances is that of LM-Infinite (Han et al., 2024) and ReRoPE (Su, 2023),
        here for the filter's scores alone.
        """
        first = rows[-1]  # of the last rows without a gap between them
        for row in reversed(rows):
            if row < first - 1:
                break
            first = row
        if self.move_keys is None or first <= ceiling:
            return keys
        positions = torch.arange(keys.shape[1], device=keys.device)
        return self.move_keys(keys, (first - ceiling - positions).clamp_min(0)).to(keys.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a filter pass showed of one prompt of `num_tokens` tokens.

    `layers`: by index, ascending; the last one is the filter layer. `rows`: the positions of their
    queries, ascending. Keys may go on behind the prompt, with a question that was repeated there.
    `heads`: those that find what is asked for, if the model is calibrated. `coverage_bound`: see
    `Choice`. `protected` and `breaks` are the request's. `backend`: the operations of the
    machine that queries and keys are on.
    """

    num_tokens: int
    layers: Mapping[int, LayerEvidence]
    rows: Sequence[int]
    backend: Backend
    protected: tuple[ProtectedRange, ...]
    breaks: TextBreaks = NO_BREAKS
    heads: Heads | None = None
    coverage_bound: float = 0.0

    @property
    def filter_layer(self) -> LayerEvidence:
        return self.layers[max(self.layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a method keeps. `positions`: ascending, [kept], int64.

    `coverage`: how focused the question's attention to the document is: the share, 0 to 1, that
    the best sixteenth of it gets; None if the method does not tell. `is_diffuse`: it was below the
    bound, so that more was kept. `has_failed`: everything is kept, for want of a choice.
    """

    positions: torch.Tensor
    coverage: float | None = None
    is_diffuse: bool = False
    has_failed: bool = False


def check_finite(scores: torch.Tensor) -> torch.Tensor:
    """`scores` as they are. Raises `ValueError` if one is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        raise ValueError("the filter layer's scores are not finite")
    return scores


class Selector(ABC):
    """Chooses which of the prompt's positions to keep, after a pass through the lower layers."""

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        """Positions of the queries that `score` wants to see, ascending; at first the last one.

        `question`: what is asked. `ends_with`: whether what stands after it is to be watched, too.
        """
        return [num_tokens - 1]

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        """The layers whose queries `score` wants to see, ascending, up to the filter layer."""
        return [filter_layer]

    @abstractmethod
    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """How much each of the prompt's tokens is wanted: [tokens], float32."""

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        """Positions within `budget`, whose `high` is below the number of tokens.

        Here: those with the highest scores. Raises `ValueError` if the scores are not finite.
        """
        scores = check_finite(self.score(evidence, params))
        return Choice(positions=scores.topk(budget.high).indices.sort().values)
