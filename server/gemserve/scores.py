"""The scores of a prompt's tokens as a reply shows them (`return_scores`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReturnScores = bool | Literal["exact"]
MOST_PASSAGES = 4096  # of one report


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionInputs:
    """What `sieve` chooses from besides the scores, so that a client can choose for other budgets.

    `protected`: start, stop and `Priority` of each protected range. `paragraphs`, `sentences`,
    `lines`: the positions of `TextBreaks`, as base64 of little-endian uint32 numbers. `limit`: the
    most tokens that are kept if `coverage` is below `coverage_bound` and `fallback` is true.
    """

    protected: tuple[tuple[int, int, int], ...]
    paragraphs: str
    sentences: str
    lines: str
    coverage_bound: float
    fallback: bool
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterScores:
    """Scores of every token of a prompt. High scores are kept.

    `tokens`: one number a token, as base64 of `dtype`, little-endian. "float32": the scores
    themselves. "uint8": 255·√share, where share is (score − low) / (high − low). `low`, `high`: the
    extreme scores. `passages`: start, stop and strength (0 to 255, as above, of the best passage's
    rank) of the passages that `sieve` kept or dropped as a whole, in the order of the text; of more
    than `MOST_PASSAGES`, the best. `whole_ratio`: floating-point operations of reading the whole
    prompt, over those of this filter pass. `inputs`: only with "exact" scores of `sieve`.
    """

    dtype: Literal["uint8", "float32"]
    tokens: str
    low: float
    high: float
    passages: tuple[tuple[int, int, int], ...]
    whole_ratio: float
    inputs: SelectionInputs | None
