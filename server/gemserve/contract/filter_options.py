"""What requests and settings say about filters, and how it is checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from gemserve.contract.adapters import ADAPTER_NAME
from gemserve.contract.scores import ReturnScores
from gemserve.errors import RequestError, shown

FilterMethod = str  # a name in the table of `filtering.methods`
Keep = int | float | Literal["auto"]
SegmentSize = int | Literal["auto", "off"]
Lexical = Literal["auto", "off"]
FilterReader = Literal["self", "reader"]
Heads = tuple[tuple[int, int], ...]  # (layer, head) pairs
MIN_KEEP = 16
MAX_KEEP = 1 << 30
MIN_SEGMENT = 256
MAX_SEGMENT = 1 << 20
BESIDE_SEGMENT = 256  # most tokens that are read with a segment: an anchor, and what is asked
MAX_HEADS = 32  # that a request may name
AUTO_MIN_KEEP = 128
AUTO_MAX_SHARE = 1 / 8
MAX_QUESTION_TOKENS = 64  # most tokens of a question that a filter watches
# A question this many tokens before the prompt's end stands in front of its document. It cannot
# attend to what follows it, so the filter pass reads it once more after the prompt.
FAR_FROM_END = 256
LIBRARY_NAME = ADAPTER_NAME
CANDIDATES = 16  # segments of libraries that are read for a question, if it does not say
MOST_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """What a request says about instructions and documents in its chat.

    `messages`: the indexes of messages that are read whole. `documents`: those of messages that are
    documents. `marks`: pairs of texts; what stands between the two of a pair is read whole, as are
    the marks.
    """

    messages: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()


NO_PROTECT = Protect()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """What a request says about its filter. None: the server's default. See `FilterParams`."""

    method: FilterMethod | None = None
    keep: Keep | None = None
    fallback: bool | None = None
    layer: int | None = None
    heads: Heads | None = None
    window: SegmentSize | None = None
    lexical: Lexical | None = None
    reader: FilterReader | None = None
    pooling: Literal["mean", "max"] | None = None
    return_selection: bool = False
    return_scores: ReturnScores = False
    return_attention: bool = False
    protect: Protect = NO_PROTECT


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterParams:
    """How a prompt is filtered: what the request says, or else the server's settings."""

    method: FilterMethod
    # The budget for documents, which does not include what is always read. A count of tokens ≥ 16,
    # or a fraction in (0, 1) of the documents, rounded up. "auto": as many as the attention calls
    # for, at most an eighth of the documents or 128 tokens, and no more than the model answers best
    # from, if that was measured.
    keep: Keep
    fallback: bool = False  # if attention is diffuse, keep what fits, all of the prompt if possible
    layer: int | None = None  # from 0, whose queries and keys choose; None: the server's
    # (layer, head) pairs from 0 that score tokens, of layers up to `layer`; None: the calibration's
    heads: Heads | None = None
    # The most tokens of a segment in which documents are read. "auto": the calibration's. "off":
    # the prompt is read as one sequence. What clients, files and users see says window for segment.
    window: SegmentSize = "auto"
    lexical: Lexical = "off"  # "auto": passages rank by the question's words, too
    reader: FilterReader = "self"  # which model looks: the one that answers, or the server's reader
    may_read_whole: bool = False  # the server decides whether the prompt is filtered: `FilterPlan`
    # the method needs a calibration that is not there yet, so the prompt is read whole
    awaits_calibration: bool = False
    pooling: Literal["mean", "max"] = "mean"
    return_selection: bool = False
    return_scores: ReturnScores = False
    return_attention: bool = False

    @property
    def is_adaptive(self) -> bool:
        """Does the number of tokens kept depend on the attention?"""
        return self.keep == "auto" or self.fallback

    def kept_count(self, num_tokens: int) -> int:
        """Number of tokens to keep of documents of `num_tokens`. With "auto", the most."""
        return kept_count(self.keep, num_tokens)


def kept_count(keep: Keep, num_tokens: int) -> int:
    """Number of tokens that `keep` means for documents of `num_tokens`. With "auto", the most."""
    if keep == "auto":
        return max(AUTO_MIN_KEEP, math.ceil(AUTO_MAX_SHARE * num_tokens))
    if isinstance(keep, float):
        # the epsilon removes rounding errors such as 0.07 * 100 = 7.000000000000001
        return max(MIN_KEEP, math.ceil(keep * num_tokens - 1e-9))
    return keep


def parse_keep(value: object) -> Keep:
    """Validate a `keep`: int ≥ 16, integral float ≥ 16, fraction in (0, 1), or "auto"."""
    if value == "auto":
        return "auto"
    limits = f'must be a fraction in (0, 1), a count from {MIN_KEEP} to {MAX_KEEP}, or "auto"'
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"filter.keep={shown(value)}: {limits}", param="filter.keep")
    if isinstance(value, float) and 0 < value < 1:
        return value
    if not MIN_KEEP <= value <= MAX_KEEP or value != int(value):
        raise RequestError(f"filter.keep={shown(value)}: {limits}", param="filter.keep")
    return int(value)


def parse_segment_size(value: Any) -> SegmentSize:
    """Validate a `window`: a count of tokens, "auto" or "off"."""
    if value == "auto" or value == "off":
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and MIN_SEGMENT <= value <= MAX_SEGMENT and value == int(value):
        return int(value)
    raise RequestError(
        f"filter.window={shown(value)}: must be a count of tokens from {MIN_SEGMENT} to "
        f'{MAX_SEGMENT}, "auto" or "off"',
        param="filter.window",
    )


def parse_heads(value: object) -> Heads:
    """Validate a request's `heads`: 1 to `MAX_HEADS` pairs of numbers from 0, each pair once.

    The planner knows which layers and heads there are. Raises `RequestError`.
    """
    if isinstance(value, (list, tuple)) and len(value) > MAX_HEADS:
        raise RequestError(
            f"filter.heads: has {len(value)} pairs, the limit is {MAX_HEADS}", param="filter.heads"
        )
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_pair, value)):
        raise RequestError(
            f"filter.heads={shown(value)}: must be a list of 1 to {MAX_HEADS} pairs "
            "[layer, head] of whole numbers from 0",
            param="filter.heads",
        )
    heads = tuple((int(layer), int(head)) for layer, head in value)
    for at, pair in enumerate(heads):
        if pair in heads[:at]:
            raise RequestError(
                f"filter.heads: {list(pair)} is there more than once; the limit is once",
                param="filter.heads",
            )
    return heads


def _is_pair(value: object) -> bool:
    """Is it a [layer, head] pair of whole numbers from 0? 2.0 is one, as everywhere in JSON."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and not any(isinstance(n, bool) for n in value)
        and all(isinstance(n, int) or (isinstance(n, float) and n.is_integer()) for n in value)
        and all(n >= 0 for n in value)
    )
