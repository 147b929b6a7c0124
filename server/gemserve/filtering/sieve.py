"""Sieve: what the end of the prompt looks at, with what stands around it, and protected spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gemserve.filtering.selector import Choice, Evidence, finite
from gemserve.filtering.spans import reserve
from gemserve.types import Budget, FilterParams

_AWAKE = 0.1  # least attention away from the first token that tells anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """A token ranks by the best score among its neighbours, in code among its lines.

    `observed`: rows of the observation window, whose attention a token's score sums. `reach`:
    neighbours on either side, so that a name or number survives whole. `lines`: tokens of code
    lines that rank as one. `focus`: share of the coverage within reach that "auto" is content with.
    `diffuse`: coverage below which attention is diffuse.
    """

    observed: int = 4
    reach: int = 8
    lines: int = 32
    focus: float = 0.98
    diffuse: float = 0.9

    def window(self, num_tokens: int) -> int:
        return min(self.observed, num_tokens)

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        num_tokens = evidence.num_tokens
        seen = evidence.backend.window_attention(
            evidence.queries, evidence.keys, scale=evidence.scale, softcap=evidence.softcap
        )
        order, ranks = self.order(finite(seen.largest), evidence.code_blocks)
        reserved = reserve(evidence.protected, num_tokens, budget.high, budget.low)
        protected = reserved.positions
        first = torch.tensor(protected, dtype=torch.long, device=order.device)
        is_free = torch.ones(num_tokens, dtype=torch.bool, device=order.device)
        is_free[first] = False
        order, ranks = order[is_free[order]], ranks[is_free[order]]
        within = budget.high - len(protected)
        coverage = _coverage(seen.last, order, reserved.rest)
        # with no room for any choice, nothing was found
        reached = round(float(coverage[within - 1]), 4) if within else 0.0
        if params.fallback and reached < self.diffuse and budget.limit > budget.high:
            ranked = torch.cat([first, order])[: budget.limit]
            return Choice(positions=ranked.sort().values, coverage=reached, is_diffuse=True)
        if within and budget.low < budget.high:
            enough = int((coverage[:within] < self.focus * reached).sum())
            whole = int((ranks >= ranks[enough]).sum())  # no passage is cut
            within = min(within, max(whole, budget.low))
        kept = torch.cat([first, order[:within]])
        return Choice(positions=kept.sort().values, coverage=reached)

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


def _coverage(last: torch.Tensor, order: torch.Tensor, rest: Sequence[int]) -> torch.Tensor:
    """What `rest` and the first i + 1 free tokens get of the most focused head's attention: [free].

    `last`: [heads, keys], one row's probabilities; `order`: the free tokens, best first; `rest`:
    what is kept of the document without being chosen. Attention to the first token is none: there
    heads rest that look for nothing (an attention sink), and one that rests almost entirely is not
    asked.
    """
    awake = 1 - last[:, 0]
    kept = last[:, list(rest)].sum(dim=1, keepdim=True) + last[:, order].cumsum(dim=1)
    return (kept / awake.clamp_min(_AWAKE)[:, None]).amax(dim=0)


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
