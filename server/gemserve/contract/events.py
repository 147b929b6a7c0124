"""What an engine says of a request, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gemserve.contract.filter_plan import KeysRead, QueriesRead, SummaryArrays
from gemserve.contract.reports import FilterReport
from gemserve.contract.scores import AnswerAttention

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The filter has decided. This comes before every token. Times are `time.monotonic()`."""

    report: FilterReport
    started_s: float
    filtered_s: float
    # what an answer would be generated from, if the request wants only a selection
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model itself, before temperature and penalties.

    `top`: the likeliest tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text that no stop string can take back, and how many tokens were drawn for it."""

    text: str
    token_ids: tuple[int, ...]
    drawn_s: float
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a prompt's tokens but the first; it comes before any `TextDelta`."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentsRead:
    """A group of segments is read: what the choice needs of each."""

    summaries: tuple[SummaryArrays, ...]
    num_cached: int  # segments that the document cache had
    cached_tokens: int  # of these segments


# Why a request ended early: its reading had not begun in time, or it was not done in time.
Lateness = Literal["not_begun", "not_done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a request."""

    reason: FinishReason
    completion_tokens: int
    peak_kv_bytes: int = 0  # with the filter pass
    decode_kv_bytes: int = 0  # that are held while decoding
    proposed_tokens: int = 0  # by prompt-lookup decoding
    accepted_tokens: int = 0  # of these
    error: str | None = None  # set exactly if the reason is `error`
    is_unread: bool = False  # nothing of its prompt was read
    late: Lateness | None = None
    retry_after_s: int | None = None  # set by the API if it has waited too long
    stop: str | None = None  # the stop string that ended the answer, if one did
    attention: AnswerAttention | None = None  # if the request asks for it
    segments_read: SegmentsRead | None = None  # if it wants no more
    vectors: KeysRead | QueriesRead | None = None  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class LentGroups:
    """The groups of segments that an engine awaits from others."""

    numbers: tuple[int, ...] = ()
    seconds: float | None = None  # to read them itself; None: it has not read anything yet


Event = Filtered | PromptScored | TextDelta | Finished
