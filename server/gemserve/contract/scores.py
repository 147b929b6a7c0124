"""What a reply shows of attention: the question's (`return_scores`), and the answer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReturnScores = bool | Literal["exact", "heads"]
MOST_PASSAGES = 4096  # of one report
MOST_ANSWER_TOKENS = 1024  # of an answer, whose attention is reported
MOST_LEANED = 8  # passages of each of these tokens
MOST_HEADS = 32  # of one report
MOST_HEAD_SCORES = 1 << 20  # of one report: bytes, one for each token and head


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionInputs:
    """What `sieve` chooses from besides the scores, so that a client can choose for other budgets.

    `protected`: start, stop and `Priority` of each protected range. `paragraphs`, `sentences`,
    `lines`, `with_line_end`: the positions of `TextBreaks`, as base64 of little-endian uint32
    numbers. `enclosed`, `enclosing_starts`, `enclosing_stops`, `enclosing_headings`: so the
    `starts`, `line_starts`, `line_stops` and `is_heading` of `EnclosingLines`. `words`: so the
    places of each of the question's words, if passages rank by them. `between`, `line_end`: how
    many tokens a blank line and a line's end have that are added between two passages that are not
    neighbours. `limit`: the most tokens that are kept if `coverage` is below `coverage_bound` and
    `fallback` is true.
    """

    protected: tuple[tuple[int, int, int], ...]
    paragraphs: str
    sentences: str
    lines: str
    with_line_end: str
    enclosed: str
    enclosing_starts: str
    enclosing_stops: str
    enclosing_headings: str
    words: tuple[str, ...]
    between: int
    line_end: int
    coverage_bound: float
    fallback: bool
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScores:
    """The scores of one head: for each token the largest attention that a watched row pays to it.

    `tokens`: 255·√(score / `heads_high`) of each token, as base64 of uint8. `counts`: whether the
    filter chose by this head. A token's score is that of the head that pays it most, among those
    that count.
    """

    layer: int
    head: int
    counts: bool
    tokens: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterScores:
    """Scores of every token of a prompt. High scores are kept.

    `tokens`: one number a token, as base64 of `dtype`, little-endian. "float32": the scores
    themselves. "uint8": 255·√share, where share is (score − low) / (high − low). `low`, `high`: the
    extreme scores. `passages`: start, stop and strength (0 to 255, as above, of the best passage's
    rank) of the passages that `sieve` kept or dropped as a whole, in the order of the text; of more
    than `MOST_PASSAGES`, the best. `whole_ratio`: floating-point operations of reading the whole
    prompt, over those of this filter pass. `inputs`: only with "exact" scores of `sieve`, or with
    "heads". `heads`: only with "heads": those that count, then others of their layers; at most
    `MOST_HEADS`, and `MOST_HEAD_SCORES` scores in all. `heads_high`: the highest of these scores.
    """

    dtype: Literal["uint8", "float32"]
    tokens: str
    low: float
    high: float
    passages: tuple[tuple[int, int, int], ...]
    whole_ratio: float
    inputs: SelectionInputs | None
    heads: tuple[HeadScores, ...] = ()
    heads_high: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAttention:
    """Which kept passages the tokens of an answer attended to (`return_attention`).

    `heads`: the (layer, head) pairs that were watched: those that the filter chooses by.
    `passages`: start and stop of prompt tokens. `offsets`: where in the generated text each token
    begins, in characters. `tokens`: for each token the strongest passages, best first, as an index
    of `passages` and a weight: the attention to the passage's kept tokens of the row that the token
    was drawn from, as the mean over the heads. The prompt's first token counts nowhere: it is an
    attention sink.
    """

    heads: tuple[tuple[int, int], ...]
    passages: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    tokens: tuple[tuple[tuple[int, float], ...], ...]
