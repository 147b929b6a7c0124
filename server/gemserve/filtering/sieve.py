"""Sieve: keeps the passages that the question attends to, and protected tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.filter_plan import Budget
from gemserve.filtering.passages import number_passages, rank_passages
from gemserve.filtering.protected_budget import reserve
from gemserve.filtering.selector import (
    Choice,
    Evidence,
    Heads,
    LayerEvidence,
    Selector,
    TokenRange,
    check_finite,
)
from gemserve.types import FilterParams, TextBreaks

COVERAGE_SHARE = 1 / 16
_AWAKE = 0.1  # a document whose scores add up to less than this has no place that stands out


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve(Selector):
    """Keeps the passages whose tokens the question attends to most.

    A token's score is the largest attention that any row of the question pays to it in any head: of
    the calibrated heads, or of all heads of the filter layer. A passage (see `filtering.passages`)
    has at most `passage_share` of the tokens that may be chosen, within `shortest` and `longest`.
    `reach`: where the text has no breaks, a token ranks by the best score among so many neighbours
    on either side. `focus`: "auto" keeps no passage whose rank is below this share of the best
    one's. `ceiling`: the largest distance between a token and the rows (see
    `LayerEvidence.keys_near`). `end_rows`: rows at the prompt's end that are watched if no question
    was found, or beside it.
    """

    passage_share: float = 1 / 4
    shortest: int = 32
    longest: int = 128
    reach: int = 8
    focus: float = 0.3
    ceiling: int = 4096
    end_rows: int = 16

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        """The question's tokens.

        Without a question, or with `ends_with`, the prompt's last ones.
        """
        rows = {row for start, stop in question for row in range(start, stop)}
        if ends_with or not rows:
            rows.update(range(max(0, num_tokens - self.end_rows), num_tokens))
        return sorted(rows)

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        return sorted({layer for layer, _ in heads or ()} | {filter_layer})

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """Scores: [tokens]. The first token scores 0, because it is an attention sink."""
        return self.score_of_heads(evidence, evidence.heads)

    def score_of_heads(
        self, evidence: Evidence, heads: Sequence[tuple[int, int]] | None
    ) -> torch.Tensor:
        """The scores by these heads; None: by all heads of the filter layer. [tokens]."""
        rows = torch.tensor(evidence.rows, device=evidence.filter_layer.keys.device)
        scores = [
            evidence.backend.largest_attention(
                query,
                layer.keys_near(key, evidence.rows, self.ceiling),
                rows,
                scale=layer.scale,
                softcap=layer.softcap,
            )
            for layer, query, key in _scoring_heads(evidence, heads)
        ]
        largest = torch.stack(scores).amax(dim=0)[: evidence.num_tokens]
        largest[0] = 0 * largest[0]  # a NaN stays a NaN
        return largest

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        num_tokens = evidence.num_tokens
        raw = check_finite(self.score(evidence, params))
        scores = raw.clone()
        reserved = reserve(evidence.protected, num_tokens, budget.high, budget.low)
        within = budget.high - len(reserved.positions)
        # a question's words attend to each other, so their neighbours would rank high
        scores[reserved.firm] = 0
        order, ranks = self.order(scores, evidence.breaks, within)
        # a choice without room has found nothing
        coverage = self.coverage(scores, reserved.firm) if within else 0.0
        is_free = _without(reserved.positions, order, num_tokens)
        first = torch.tensor(reserved.positions, dtype=torch.long, device=order.device)
        order, ranks = order[is_free], ranks[is_free]
        is_trusted = coverage >= evidence.coverage_bound
        if params.fallback and not is_trusted and budget.limit > budget.high:
            ranked = torch.cat([first, order])[: budget.limit]
            positions = ranked.sort().values
            return Choice(positions=positions, coverage=coverage, is_diffuse=True, scores=raw)
        if within and budget.low < budget.high:
            whole = int((ranks >= self.focus * ranks[0]).sum())  # so that no passage is cut
            within = min(within, max(whole, budget.low))
        kept = torch.cat([first, order[:within]])
        return Choice(positions=kept.sort().values, coverage=coverage, scores=raw)

    def order(
        self, scores: torch.Tensor, breaks: TextBreaks, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions, best first, and the score that each ranks by in that order; both [tokens].

        Within a passage those with the best neighbours come first. `room`: tokens to be chosen.
        """
        limit = self.passage_limit(room)
        numbers = torch.from_numpy(number_passages(len(scores), breaks, limit)).to(scores.device)
        near = self._best_near(scores)
        ranks = torch.where(numbers > 0, rank_passages(scores, numbers), near)
        order = torch.arange(len(scores), device=scores.device)
        for key in (scores, near, ranks):  # the last range counts most
            order = order[key[order].sort(descending=True, stable=True).indices]
        return order, ranks[order]

    def passage_limit(self, room: int) -> int:
        """The most tokens of a passage, if `room` tokens are to be chosen."""
        return round(min(max(self.passage_share * room, self.shortest), self.longest))

    def coverage(self, scores: torch.Tensor, outside: Sequence[int] = ()) -> float:
        """The share of a document's scores that its best sixteenth has, 0 to 1.

        `outside`: positions that are not part of the document. Tokens rank by their neighbours. The
        sixteenth does not depend on how much is kept, so one bound fits every budget and every
        text.
        """
        order = self._best_near(scores).sort(descending=True, stable=True).indices
        document = scores[order[_without(outside, order, len(scores))]]
        best = document[: max(1, round(COVERAGE_SHARE * len(document)))].sum()
        return round(float(best / document.sum().clamp_min(_AWAKE)), 4)

    def _best_near(self, scores: torch.Tensor) -> torch.Tensor:
        """The best score within `reach` tokens of each: [tokens]."""
        width = 2 * self.reach + 1
        return F.max_pool1d(scores[None, None], width, stride=1, padding=self.reach).flatten()


def _scoring_heads(
    evidence: Evidence, scoring: Sequence[tuple[int, int]] | None
) -> list[tuple[LayerEvidence, torch.Tensor, torch.Tensor]]:
    """Layer, queries and keys of the heads that score, grouped by the keys they read."""
    if scoring is None:
        layer = evidence.filter_layer
        return [(layer, layer.queries, layer.keys)]
    heads = []
    for index, head in scoring:
        layer = evidence.layers[index]
        kv_head = head * layer.keys.shape[0] // layer.queries.shape[0]
        heads.append((layer, layer.queries[head, None], layer.keys[kv_head, None]))
    return heads


def _without(taken: Sequence[int], order: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Which places of `order` hold positions that are not in `taken`: [tokens], bool."""
    is_free = torch.ones(num_tokens, dtype=torch.bool, device=order.device)
    is_free[torch.tensor(taken, dtype=torch.long, device=order.device)] = False
    return is_free[order]
