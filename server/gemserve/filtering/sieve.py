"""Sieve: what the end of the prompt looks at, kept in whole chunks, around protected spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gemserve.filtering.selector import Choice, Evidence, finite
from gemserve.filtering.spans import reserved_positions
from gemserve.types import Budget, FilterParams
from gemserve_kernels import window_attention

_AWAKE = 0.1  # least attention away from the first token that tells anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """Chunks ranked by their best token; a token's score sums the window's attention to it.

    `observed`: rows of the observation window. `chunk`: tokens ranked as one. `margin`: tokens
    kept on either side of a chosen chunk, so that a passage cut by a chunk border survives.
    `focus`: share of the coverage within reach that "auto" is content with. `diffuse`: coverage
    below which attention is diffuse.
    """

    observed: int = 16
    chunk: int = 16
    margin: int = 8
    focus: float = 0.98
    diffuse: float = 0.5

    def window(self, num_tokens: int) -> int:
        return min(self.observed, num_tokens)

    def choose(self, evidence: Evidence, budget: Budget, params: FilterParams) -> Choice:
        num_tokens = evidence.num_tokens
        seen = window_attention(
            evidence.queries, evidence.keys, scale=evidence.scale, softcap=evidence.softcap
        )
        order, groups = self.order(finite(seen.largest), evidence.code_blocks)
        protected = reserved_positions(evidence.protected, num_tokens, budget.high)
        first = torch.tensor(protected, dtype=torch.long, device=order.device)
        is_free = torch.ones(num_tokens, dtype=torch.bool, device=order.device)
        is_free[first] = False
        order, groups = order[is_free[order]], groups[is_free[order]]
        within = budget.high - len(protected)
        if within == 0:
            return Choice(positions=first.sort().values)

        coverage = _coverage(seen.last, order)
        reached = round(float(coverage[within - 1]), 4)
        if params.fallback and reached < self.diffuse and budget.limit > budget.high:
            ranked = torch.cat([first, order])[: budget.limit]
            return Choice(positions=ranked.sort().values, coverage=reached, is_diffuse=True)
        if budget.low < budget.high:
            enough = int((coverage[:within] < self.focus * reached).sum())
            whole_chunks = int((groups <= groups[enough]).sum())
            within = min(within, max(whole_chunks, budget.low))
        kept = torch.cat([first, order[:within]])
        return Choice(positions=kept.sort().values, coverage=reached)

    def order(
        self, scores: torch.Tensor, code_blocks: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions, best first, and the rank of each one's chunk.

        By chunk rank (a margin has its chunk's), then by score.

        Chunks of code have no margins, which would cut its lines, and are larger instead.
        """
        num_tokens = scores.shape[0]
        code_size = self.chunk + 2 * self.margin
        ids, is_code = chunk_ids(num_tokens, self.chunk, code_size, code_blocks)
        chunks = torch.from_numpy(ids).to(scores.device)
        best = torch.full((int(chunks[-1]) + 1,), -torch.inf, device=scores.device)
        best.scatter_reduce_(0, chunks, scores, "amax")
        rank = torch.empty_like(best, dtype=torch.long)
        rank[best.sort(descending=True, stable=True).indices] = torch.arange(
            len(best), device=scores.device
        )
        own = rank[chunks]
        if self.margin:  # the best rank of the chunks whose margins reach here
            window = -F.max_pool1d(
                -own[None, None].double(), 2 * self.margin + 1, stride=1, padding=self.margin
            )
            is_text = torch.from_numpy(~is_code).to(scores.device)
            own = torch.where(is_text, window[0, 0].long(), own)
        by_score = scores.sort(descending=True, stable=True).indices
        order = by_score[own[by_score].sort(stable=True).indices]
        return order, own[order]


def _coverage(last: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What the first i + 1 free tokens get of the most focused head's attention: [free].

    `last`: [heads, keys], one row's probabilities; `order`: the free tokens, best first. Attention
    to the first token is none: there heads rest that look for nothing (an attention sink), and one
    that rests almost entirely is not asked.
    """
    awake = 1 - last[:, 0]
    shares = last[:, order].cumsum(dim=1) / awake.clamp_min(_AWAKE)[:, None]
    return shares.amax(dim=0)


def chunk_ids(
    num_tokens: int, size: int, code_size: int, code_blocks: Sequence[Sequence[int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The chunk of each position, from 0, ascending, and whether it is code: [num_tokens] each.

    `size` tokens each; in a code block whole lines, as many as make up `code_size` tokens. A line
    longer than that is cut again at every 4 · `code_size`.
    """
    cuts = np.zeros(num_tokens, dtype=np.int64)
    is_code = np.zeros(num_tokens, dtype=np.bool_)
    cuts[::size] = 1
    for block in code_blocks:
        if len(block) < 2:
            continue
        lines = [min(line, num_tokens) for line in block]
        cuts[lines[0] + 1 : lines[-1]] = 0
        is_code[lines[0] : lines[-1]] = True
        start = lines[0]
        for line in lines[1:]:
            if line - start >= code_size:
                cuts[start : line : 4 * code_size] = 1
                start = line
        for edge in (lines[0], start, lines[-1]):
            cuts[edge : edge + 1] = 1
    cuts[0] = 0
    return np.cumsum(cuts), is_code
