"""The interface of a filter method that looks at the prompt: evidence in, positions out.

A new method is one file with one `score`, and a line in the table of `filtering.methods`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS, FilterParams, Heads
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import (
    NO_BREAKS,
    NO_SEPARATORS,
    ProtectedRange,
    Separators,
    TextBreaks,
    TokenArray,
)
from gemserve.contract.scores import HeadScores, SelectionInputs
from gemserve.cost import ModelShape
from gemserve.filtering.joined_text import Gaps
from gemserve.filtering.protected_budget import always_read
from gemserve.filtering.segment_scores import SegmentSummary
from gemserve_kernels import Backend

TokenRange = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEvidence:
    """One layer's queries [heads, rows, head_dim] and keys [kv_heads, read, head_dim].

    Both are after RoPE. `scale` and `softcap` are those of the layer's own attention. `move_keys`
    gives keys [heads, tokens, head_dim] as they would be that many positions [tokens] further on.
    It is None if the layer does not rotate keys by their positions.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None
    move_keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def keys_near(self, keys: torch.Tensor, rows: Sequence[int], ceiling: int) -> torch.Tensor:
        """`keys` as if none stood more than `ceiling` positions before the watched rows.

        Heads that find facts may fail over distances that they were not trained on. The ceiling on
        distances is that of LM-Infinite (Han et al., 2024) and ReRoPE (Su, 2023). Here it applies
        to the filter's scores alone.
        """
        first = rows[-1]  # the last rows that follow each other without a gap
        for row in reversed(rows):
            if row < first - 1:
                break
            first = row
        if self.move_keys is None or first <= ceiling:
            return keys
        positions = torch.arange(keys.shape[1], device=keys.device)
        return self.move_keys(keys, (first - ceiling - positions).clamp_min(0)).to(keys.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEvidence:
    """What a choice needs to know of a prompt of `num_tokens` tokens besides its scores.

    `coverage_bound`: see `Choice`. `protected` and `breaks` are the request's, and so are `words`,
    if passages rank by them. `separators`: what may be added between two passages.
    """

    num_tokens: int
    protected: tuple[ProtectedRange, ...]
    breaks: TextBreaks = NO_BREAKS
    coverage_bound: float = 0.0
    words: tuple[TokenArray, ...] = ()
    separators: Separators = NO_SEPARATORS

    @property
    def gaps(self) -> Gaps:
        """What stands between two kept tokens."""
        is_document = np.ones(self.num_tokens, dtype=np.bool_)
        is_document[always_read(self.protected, self.num_tokens)] = False
        return Gaps(self.breaks, is_document, self.separators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(PromptEvidence):
    """What a filter pass over a whole prompt showed, or over one of its segments.

    `layers`: by index, ascending; the last one is the filter layer. `rows`: the positions of their
    queries, ascending; the first `num_asked` are of the question alone, the others also of calls
    (0: there are no calls). There may be keys after the prompt's, of a question repeated there.
    `heads`: those that find facts, if the model is calibrated. `backend`: the operations of the
    machine that queries and keys are on.
    """

    layers: Mapping[int, LayerEvidence]
    rows: Sequence[int]
    backend: Backend
    heads: Heads | None = None
    num_asked: int = 0

    @property
    def of_question(self) -> Evidence:
        """The same without the rows of calls."""
        count = self.num_asked
        layers = {
            index: replace(layer, queries=layer.queries[:, :count])
            for index, layer in self.layers.items()
        }
        return replace(self, layers=layers, rows=self.rows[:count], num_asked=0)

    @property
    def filter_layer(self) -> LayerEvidence:
        return self.layers[max(self.layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvidence(PromptEvidence):
    """What filter passes over the segments of a prompt showed.

    `scores`: of every token, see `segment_scores.pooled_scores`: [tokens], float32. `shares`: see
    `SegmentSummary`: [2, tokens], 0 outside of the segments.
    """

    scores: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a method keeps. `positions`: ascending, [kept], int64.

    `coverage`: the share, 0 to 1, of the question's attention to the document that its best
    sixteenth gets; None if the method does not measure it. `is_diffuse`: coverage was below the
    bound, so more was kept. `scores`: [tokens], float32, what the method chose by. `best`: the
    half-open ranges of the passages that are kept, the best first, if whole passages are.
    """

    positions: torch.Tensor
    coverage: float | None = None
    is_diffuse: bool = False
    scores: torch.Tensor | None = None
    best: tuple[TokenRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDetails:
    """What a method reports beside its scores: the fields of `FilterScores` of the same names."""

    passages: tuple[tuple[int, int, int], ...] = ()
    inputs: SelectionInputs | None = None
    heads: tuple[HeadScores, ...] = ()
    heads_high: float = 0.0


def check_finite(scores: torch.Tensor) -> torch.Tensor:
    """Return `scores`. Raises `ValueError` if one is NaN or infinite."""
    if not bool(scores.isfinite().all()):
        raise ValueError("the filter layer's scores are not finite")
    return scores


class Selector(ABC):
    """Chooses which positions of the prompt to keep, after a pass through the lower layers.

    `reads_segments`: it can score segments of a document that were read alone. `keeps_passages`: it
    keeps whole ones, which are separated where they were not neighbours.
    """

    reads_segments: ClassVar[bool] = False
    keeps_passages: ClassVar[bool] = False

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        """Positions of the queries that `score` needs, ascending. By default the last one.

        `question`: the ranges of the question. `ends_with`: whether the rows after it are watched,
        too.
        """
        return [num_tokens - 1]

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        """The layers whose queries `score` needs, ascending, up to the filter layer."""
        return [filter_layer]

    def summarize_segment(self, evidence: Evidence, num_sinks: int, start: int) -> SegmentSummary:
        """What the choice needs to know of one segment. Only if `reads_segments`.

        The segment's first `num_sinks` tokens have no score. The next one is token `start` of the
        prompt.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """A score for each token of the prompt: [tokens], float32. High scores are kept."""

    def choose(self, evidence: PromptEvidence, budget: Budget, params: FilterParams) -> Choice:
        """Positions within `budget`, whose `high` is below the number of tokens.

        With what is added between them they are within it, too.

        `evidence`: an `Evidence`, or a `SegmentEvidence` if the prompt was read in segments. By
        default those with the highest scores. Raises `ValueError` if the scores are not finite.
        """
        assert isinstance(evidence, Evidence)
        scores = check_finite(self.score(evidence, params))
        return Choice(positions=scores.topk(budget.high).indices.sort().values, scores=scores)

    def details(
        self, scores: torch.Tensor, evidence: PromptEvidence, budget: Budget, params: FilterParams
    ) -> ScoreDetails:
        """What a report of `scores` [tokens], which it chose by, shows besides. By default nothing.

        `params.return_scores` says how much is requested.
        """
        return ScoreDetails()

    def score_flops(self, shape: ModelShape, num_tokens: int) -> float:
        """FLOPs of `score` over a prompt, at most.

        By default those of a question's rows, in every head of the filter layer.
        """
        return MAX_QUESTION_TOKENS * shape.row(num_tokens)
