"""Sieve: what the question looks at, with what stands around it, and protected spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gemserve.filter_plan import Budget
from gemserve.filtering.reserve import reserve
from gemserve.filtering.selector import (
    Choice,
    Evidence,
    Heads,
    LayerEvidence,
    Selector,
    TokenRange,
    check_finite,
)
from gemserve.types import FilterParams

COVERAGE_SHARE = 1 / 16
_AWAKE = 0.1  # a document that gets less attention than this in all is not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve(Selector):
    """A token ranks by the best score among its neighbours, in code among its lines.

    Its score is the largest attention that any row of the question and any head pays to it: of the
    calibrated heads, or of all heads of the filter layer. `reach`: neighbours on either side, so
    that a name or number survives whole. `lines`: tokens of code lines that rank as one. `focus`:
    "auto" keeps no passage whose score is below this share of the best one's. `end_rows`: rows at
    the prompt's end that look where no question was found, or beside it.
    """

    reach: int = 8
    lines: int = 32
    focus: float = 0.1
    end_rows: int = 16

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        """The question's tokens; where none was found or `ends_with`, the prompt's last ones."""
        rows = {row for start, stop in question for row in range(start, stop)}
        if ends_with or not rows:
            rows.update(range(max(0, num_tokens - self.end_rows), num_tokens))
        return sorted(rows)

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        return sorted({layer for layer, _ in heads or ()} | {filter_layer})

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """[tokens]. The first token scores 0: heads that look for nothing rest there."""
        rows = torch.tensor(evidence.rows, device=evidence.filter_layer.keys.device)
        scores = [
            evidence.backend.largest_attention(
                query, key, rows, scale=layer.scale, softcap=layer.softcap
            )
            for layer, query, key in _looking(evidence)
        ]
        largest = torch.stack(scores).amax(dim=0)[: evidence.num_tokens]
        largest[0] = 0 * largest[0]  # a NaN stays one
        return largest

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        num_tokens = evidence.num_tokens
        scores = check_finite(self.score(evidence, params))
        reserved = reserve(evidence.protected, num_tokens, budget.high, budget.low)
        within = budget.high - len(reserved.positions)
        scores[reserved.firm] = 0  # a question's words look at each other, not at their neighbours
        order, ranks = self.order(scores, evidence.code_blocks)
        # with no room for any choice, nothing was found
        document = order[_without(reserved.firm, order, num_tokens)]
        coverage = coverage_of(scores[document]) if within else 0.0
        is_free = _without(reserved.positions, order, num_tokens)
        first = torch.tensor(reserved.positions, dtype=torch.long, device=order.device)
        order, ranks = order[is_free], ranks[is_free]
        is_trusted = coverage >= evidence.coverage_bound
        if params.fallback and not is_trusted and budget.limit > budget.high:
            ranked = torch.cat([first, order])[: budget.limit]
            return Choice(positions=ranked.sort().values, coverage=coverage, is_diffuse=True)
        if within and budget.low < budget.high:
            whole = int((ranks >= self.focus * ranks[0]).sum())  # no passage is cut
            within = min(within, max(whole, budget.low))
        kept = torch.cat([first, order[:within]])
        return Choice(positions=kept.sort().values, coverage=coverage)

    def order(
        self, scores: torch.Tensor, code_blocks: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions, best first, and in that order what they rank by; both [tokens].

        Within a passage the tokens with the highest scores come first.
        """
        best = F.max_pool1d(
            scores[None, None], 2 * self.reach + 1, stride=1, padding=self.reach
        ).flatten()
        if code_blocks:
            ids = code_groups(scores.shape[0], self.lines, code_blocks)
            groups = torch.from_numpy(ids).to(scores.device)
            of_group = torch.full((int(ids.max()) + 1,), -torch.inf, device=scores.device)
            of_group.scatter_reduce_(0, groups, scores, "amax")
            best = torch.where(groups > 0, of_group[groups], best)
        by_score = scores.sort(descending=True, stable=True).indices
        order = by_score[best[by_score].sort(descending=True, stable=True).indices]
        return order, best[order]


def _looking(evidence: Evidence) -> list[tuple[LayerEvidence, torch.Tensor, torch.Tensor]]:
    """Layer, queries and keys of the heads that look, each group with the keys that it reads."""
    if evidence.heads is None:
        layer = evidence.filter_layer
        return [(layer, layer.queries, layer.keys)]
    looking = []
    for index, head in evidence.heads:
        layer = evidence.layers[index]
        kv_head = head * layer.keys.shape[0] // layer.queries.shape[0]
        looking.append((layer, layer.queries[head, None], layer.keys[kv_head, None]))
    return looking


def _without(taken: Sequence[int], order: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Which places of `order` hold positions that are not `taken`: [tokens], bool."""
    is_free = torch.ones(num_tokens, dtype=torch.bool, device=order.device)
    is_free[torch.tensor(taken, dtype=torch.long, device=order.device)] = False
    return is_free[order]


def coverage_of(scores: torch.Tensor) -> float:
    """The share of a document's scores that the best sixteenth of its tokens has, 0 to 1.

    `scores`: of the document's tokens, best passage first. It does not depend on how much is kept,
    so that one bound, found by calibration, fits every budget.
    """
    best = scores[: max(1, round(COVERAGE_SHARE * len(scores)))].sum()
    return round(float(best / scores.sum().clamp_min(_AWAKE)), 4)


def code_groups(
    num_tokens: int, size: int, code_blocks: Sequence[Sequence[int]]
) -> npt.NDArray[np.int64]:
    """Which lines of code each position ranks with, from 1; 0 outside of code: [num_tokens].

    As many whole lines as make up `size` tokens. More than that is cut again at every 4 · `size`.
    """
    cuts = np.zeros(num_tokens, dtype=np.int64)
    is_code = np.zeros(num_tokens, dtype=np.bool_)
    for block in code_blocks:
        if len(block) < 2:
            continue
        lines = [min(line, num_tokens) for line in block]
        is_code[lines[0] : lines[-1]] = True
        start = lines[0]
        for line in lines[1:]:
            if line - start >= size or line == lines[-1]:
                cuts[start : line : 4 * size] = 1
                start = line
    return np.where(is_code, np.cumsum(cuts), 0)
