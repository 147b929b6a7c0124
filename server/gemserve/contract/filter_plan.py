"""What a filter will do to one prompt, as frozen data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

GROUP_TOKENS = 8192  # of the segments that are read together, if there is more than one
# Segments that are read together. What is asked is read behind each, so many short ones take much
# memory; segments of usual sizes are fewer.
GROUP_SEGMENTS = 64

# Why a prompt was not filtered, or why more of it was kept than requested (`widened`).
FilterReason = Literal[
    "short_prompt",
    "not_calibrated",
    "mostly_protected",
    "cached",
    "disabled",
    "prompt_logprobs",
    "diffuse_attention",
    "widened",
    "error",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many tokens a filter keeps: `low` to `high`, or `limit` if attention is diffuse.

    `several`: the most if several passages answer alike; 0: no more than `high`. All four include
    what is always read, `protected` tokens.
    """

    low: int
    high: int
    limit: int
    several: int = 0
    protected: int = 0

    @property
    def least_chosen(self) -> int:
        """The fewest tokens that are kept of documents, if they have as many."""
        return self.low - self.protected


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a document, tokens start..stop−1 of the prompt, which is read alone.

    `name`: a hash of all that is read before the question: the anchor and these tokens.
    """

    start: int
    stop: int
    name: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt in it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """How the documents of a prompt are read in segments, each alone from position 0.

    A pass over one reads the `anchor`, the segment's tokens, and then the tokens `asked`, of which
    those with the indexes in `FilterPlan.rows` are watched. `size`: the most tokens of a segment.
    """

    size: int
    anchor: tuple[int, ...]
    asked: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments, without what is read before and behind each."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def groups(self) -> list[range]:
        """The indexes of the segments that are read together.

        At most `GROUP_TOKENS` tokens, if there is more than one, and `GROUP_SEGMENTS` segments.
        """
        return list(self._groups())

    def _groups(self) -> Iterator[range]:
        first, count = 0, 0
        for index, segment in enumerate(self.segments):
            is_full = count + segment.num_tokens > GROUP_TOKENS or index - first == GROUP_SEGMENTS
            if index > first and is_full:
                yield range(first, index)
                first, count = index, 0
            count += segment.num_tokens
        yield range(first, len(self.segments))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummaryArrays:
    """What the choice needs to know of one segment, as it travels between engines.

    The fields are those of `filtering.segment_scores.SegmentSummary`, float32. `places` are int32,
    and count from the segment's first token.
    """

    sinks: npt.NDArray[np.float32]
    keys: npt.NDArray[np.float32]
    best: npt.NDArray[np.float32]
    places: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeysRead:
    """The keys by which segments are found later, as if each token stood at position 0.

    `segments`: one array for each, [key heads, tokens, head_dim], float32. The key heads are those
    that the plan's `heads` read (`key_heads`).
    """

    segments: tuple[npt.NDArray[np.float32], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueriesRead:
    """What a question alone looks for: the queries of the plan's `heads` in its rows.

    `queries`: [heads, rows, head_dim], with the attention's scale, as they are `distance` positions
    behind position 0. `sinks`: the log-sum-exps of the logits of the anchor's tokens, [heads,
    rows]. Both are float32. `softcaps`: of each head.
    """

    queries: npt.NDArray[np.float32]
    sinks: npt.NDArray[np.float32]
    softcaps: tuple[float | None, ...]


def key_heads(
    heads: tuple[tuple[int, int], ...], num_heads: int, num_kv_heads: int
) -> tuple[tuple[int, int], ...]:
    """The (layer, key head) pairs that (layer, head) pairs read, each once, ascending."""
    return tuple(sorted({(layer, head * num_kv_heads // num_heads) for layer, head in heads}))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterPlan:
    """How one prompt will be filtered. `filtering.planner` makes it when the request is built."""

    reason: FilterReason | None  # why the prompt is read whole, if it is
    # Tokens that the answer is generated from; before a filter has chosen, the most that it keeps
    # if attention is not diffuse.
    num_kept: int
    budget: Budget
    fails_open: bool = False  # if the filter pass fails, the whole prompt is kept
    layer: int | None = None  # where the filter pass ends; None: there is none
    kv_index: int | None = None  # how many layers below have keys and values; None: all
    # positions whose queries are watched in each of the layers `tapped`
    rows: tuple[int, ...] = ()
    # the first of the rows that are the question's, without what calls are about (0: no calls)
    num_asked: int = 0
    tapped: tuple[int, ...] = ()
    # the (layer, head) pairs that count; None: all heads of the filter layer
    heads: tuple[tuple[int, int], ...] | None = None
    coverage_bound: float = 0.0  # below it a choice is not trusted
    repeated: tuple[int, ...] = ()  # token ids that the filter pass reads after the prompt
    segments: SegmentPlan | None = None  # that the pass reads; None: the prompt as one sequence
    # the prompt is read whole instead if the document cache has so much of it that this is cheaper
    may_read_whole: bool = False
    # tokens at the prompt's beginning that are always read, and so begin what is kept whatever is
    # asked
    num_stable: int = 0
    num_sinks: int = 0  # tokens of an anchor behind which a question is read that is read alone
    evicts: bool = False  # the whole prompt is read, and then keys and values are dropped
    # The positions that are kept without a pass of this model, and what the answer is generated
    # from: the tokens at these positions, and the indexes in `joined` of those that were added
    # between them (empty: nothing was).
    chosen: tuple[int, ...] | None = None
    joined: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    # The (layer, head) pairs whose attention is watched while the answer is generated; None: all
    # heads of `answer_layer`. If that is None, nothing is watched.
    answer_layer: int | None = None
    answer_heads: tuple[tuple[int, int], ...] | None = None

    @property
    def num_below(self) -> int:
        """How many layers below the filter layer have keys and values: see `filter_units`."""
        assert self.layer is not None
        return self.layer if self.kv_index is None else self.kv_index

    def having(self, **changes: Any) -> FilterPlan:
        """The plan with some fields changed."""
        return replace(self, **changes)
