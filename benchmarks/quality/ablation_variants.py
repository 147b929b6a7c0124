"""The variants of sieve that `ablation.py` compares: each chooses positions from one evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gemserve.calibration.files import Calibration
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.protected_budget import protected_positions
from gemserve.filtering.selector import Evidence
from gemserve.filtering.sieve import Sieve

REST_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedExample:
    """One example in all layers, with the rows of `question` and the prompt's last rows."""

    evidence: Evidence
    calibration: Calibration
    question: Sequence[tuple[int, int]]


Choose = Callable[[ObservedExample, int], list[int]]  # takes the number of tokens to keep


def variant(
    sieve: Sieve = Sieve(),  # noqa: B008, a frozen value
    *,
    rows: int | None = None,
    all_heads: bool = False,
    heads: str = "max",
    window: str = "max",
    more_layers: int = 0,
    rest: float | None = REST_SHARE,
    chunk: int | None = None,
) -> Choose:
    """A choice like sieve's, with one thing changed.

    `rows`: watch so many rows at the prompt's end instead of sieve's. `all_heads`: use all heads of
    the filter layer instead of the calibrated ones. `heads`, `window`: how the probabilities of
    heads, and then those of rows, become one score ("max" or "sum"). `more_layers`: also use the
    heads of so many lower layers. `rest`: see `reserved`. `chunk`: rank fixed chunks of that size
    as a whole, with margins of half a chunk.
    """

    def choose(example: ObservedExample, keep: int) -> list[int]:
        evidence, calibration = example.evidence, example.calibration
        num_tokens = evidence.num_tokens
        watched = sieve.rows(num_tokens, example.question, calibration.ends_with)
        if rows is not None:
            watched = list(range(num_tokens - rows, num_tokens))
        scoring = calibration.heads
        if all_heads or more_layers or scoring is None:
            lowest = max(0, calibration.layer - more_layers)
            count = evidence.layers[calibration.layer].queries.shape[0]
            scoring = tuple(
                (i, h)
                for i in evidence.layers
                if lowest <= i <= calibration.layer
                for h in range(count)
            )
        scores = reduced(reduced(probabilities(evidence, scoring, watched), heads), window)
        scores[0] = 0.0
        protected: Sequence[int] = ()
        if rest is not None:
            protected = reserved(evidence.protected, num_tokens, keep, rest)
        if chunk is None:
            order, _ = sieve.order(scores, evidence.breaks, keep - len(protected))
        else:
            order = by_chunks(scores, chunk)
        kept = dict.fromkeys([*protected, *order.tolist()])
        return sorted(list(kept)[:keep])

    return choose


def by_chunks(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Positions by the rank of their chunk, or of the best chunk whose margin reaches them."""
    margin, num_tokens = size // 2, len(scores)
    padded = torch.nn.functional.pad(scores, (0, -num_tokens % size), value=-torch.inf)
    best = padded.view(-1, size).amax(1).repeat_interleave(size)[:num_tokens]
    reach = torch.nn.functional.max_pool1d(best[None, None], 2 * margin + 1, 1, margin)[0, 0]
    by_score = scores.sort(descending=True, stable=True).indices
    return by_score[reach[by_score].sort(descending=True, stable=True).indices]


def reserved(
    spans: Sequence[ProtectedRange], num_tokens: int, budget: int, rest: float
) -> list[int]:
    chosen: list[int] = []
    for last, share in ((Priority.QUESTION, 1.0), (Priority.FRAME, 0.75), (Priority.TAIL, rest)):
        allowed = [s for s in spans if s.priority <= last]
        most = max(len(chosen), int(share * budget))
        chosen = protected_positions(allowed, num_tokens, most)
    return chosen


def probabilities(
    evidence: Evidence, heads: Sequence[tuple[int, int]], rows: Sequence[int]
) -> torch.Tensor:
    """The attention of these rows in these (layer, head) pairs: [heads, rows, tokens]."""
    at = [evidence.rows.index(row) for row in rows]
    future = torch.arange(evidence.num_tokens)[None] > torch.tensor(rows)[:, None]
    looks = []
    for index, head in heads:
        layer = evidence.layers[index]
        keys = layer.keys[head * layer.keys.shape[0] // layer.queries.shape[0]]
        scores = layer.queries[head, at] @ keys.T * layer.scale
        looks.append(scores.masked_fill(future, -torch.inf).softmax(-1))
    return torch.stack(looks)


def reduced(values: torch.Tensor, how: str) -> torch.Tensor:
    return values.amax(0) if how == "max" else values.sum(0)


def by_gemfilter(example: ObservedExample, keep: int) -> list[int]:
    budget = Budget(low=keep, high=keep, limit=keep)
    params = FilterParams(method="gemfilter", keep=keep)
    layer = example.calibration.layer
    evidence = replace(example.evidence, layers={layer: example.evidence.layers[layer]})
    return list(GemFilter().choose(evidence, budget, params).positions.tolist())


VARIANTS: dict[str, Choose] = {
    "sieve": variant(),
    **{f"last {rows} rows": variant(rows=rows) for rows in (1, 4, 16, 64)},
    "all heads": variant(all_heads=True),
    "heads summed": variant(heads="sum"),
    "rows summed": variant(window="sum"),
    "all heads of 2 layers": variant(more_layers=1),
    "all heads of 3 layers": variant(more_layers=2),
    **{f"passages of up to {n}": variant(Sieve(longest=n)) for n in (32, 64, 256)},
    **{f"passages of at least {n}": variant(Sieve(shortest=n)) for n in (16, 64)},
    "half a budget a passage": variant(Sieve(passage_share=1 / 2)),
    **{f"chunks of {n}": variant(chunk=n) for n in (8, 16, 32)},
    "nothing protected": variant(rest=None),
    **{f"rest up to {share}": variant(rest=share) for share in (0.0, 0.5)},
    "gemfilter": by_gemfilter,
}
