"""Ranks passages by the question's words, and joins that with their rank by attention.

Words find what attention overlooks, such as a rare name, and the other way round: the judge that
puts a passage first counts. Okapi BM25: Robertson and Zaragoza, 2009, equation 3.15, with Lucene's
logarithm. Reciprocal rank fusion: Cormack, Clarke and Büttcher, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gemserve.contract.prompt_parts import NO_BREAKS, TextBreaks, TokenArray
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.whole_blocks import block_around

_SATURATION = 1.5  # k1
_BY_LENGTH = 0.75  # b
# The lower it is, the more counts a place among the first. Published with 60, for runs of a
# thousand documents; a budget holds few passages.
_FUSION = 3

# A word that more than this share of the passages has, and more than a few, says nothing.
_COMMON, _FEW = 0.2, 3

_SKIPPED = 3
# A passage answers as well as the best one if it has these shares of what the best has.
_OF_BEST_ATTENTION = 0.2
_OF_BEST_WORDS = 0.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankedPassages:
    """Passages of a prompt, the best first.

    `starts`, `stops`: half-open, ascending. `num_free`: how many tokens of each may be chosen.
    `attention`, `words`: what each ranks by; without words the latter are 0. `order`: indexes, best
    first, of those that have any. All [passages].
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    num_free: npt.NDArray[np.int64]
    attention: Floats
    words: Floats
    order: npt.NDArray[np.int64]

    @staticmethod
    def of(
        starts: npt.NDArray[np.int64],
        attention: Floats,
        is_free: npt.NDArray[np.bool_],
        words: Sequence[TokenArray],
    ) -> RankedPassages:
        """`starts`: [passages], from 0 on. `is_free`: [tokens]. `words`: see `word_scores`."""
        stops = np.append(starts[1:], len(is_free))
        num_free = np.add.reduceat(is_free.astype(np.int64), starts)
        attention = np.where(num_free > 0, attention, -1.0)
        of_words = word_scores(words, starts, num_free)
        best = fused(attention, of_words) if words else attention
        order = np.lexsort((-attention, -best))  # the last key counts most
        order = order[num_free[order] > 0]
        return RankedPassages(starts, stops, num_free, attention, of_words, order)

    def count_focused(self, focus: float) -> int:
        """Tokens of the passages with at least the share `focus` of the best one's attention."""
        is_focused = self.attention >= focus * self.attention.max(initial=0)
        return int(self.num_free[is_focused].sum())

    def alike(self) -> npt.NDArray[np.int64]:
        """Indexes of the passages that both judges find nearly as good as their best, in order."""
        attention, words = self.attention[self.order], self.words[self.order]
        is_attended = attention >= _OF_BEST_ATTENTION * attention.max(initial=0)
        has_words = words >= _OF_BEST_WORDS * words.max(initial=0)
        return self.order[is_attended & has_words & (attention > 0) & (words > 0)]

    def with_first(self, first: npt.NDArray[np.int64]) -> RankedPassages:
        """The same with some passages before all others."""
        others = self.order[~np.isin(self.order, first)]
        return replace(self, order=np.concatenate([first, others]))

    def fill(
        self,
        kept: KeptRanges,
        most: int,
        breaks: TextBreaks = NO_BREAKS,
        enough: int | None = None,
    ) -> tuple[tuple[int, int], ...]:
        """Add the best passages to what is kept, while it has `most` tokens at most.

        Each has the indentation of its first line, not that of the line behind it, and comes with
        the lines that enclose its beginning, if they fit, too; the best one of code with its whole
        block, if that takes half of the room at most. The rest of the room stays empty after
        `_SKIPPED` passages that did not fit. `enough`: so many tokens are. Returns the added
        passages, the best first.
        """
        added: list[tuple[int, int]] = []
        skipped, chosen, half = 0, 0, (most - kept.size) // 2
        for index in self.order.tolist():
            start, stop = int(self.starts[index]), int(self.stops[index])
            start -= breaks.is_with_line_end(start - 1)
            stop -= breaks.is_with_line_end(stop - 1)
            if kept.add_within(most, [(start, max(start + 1, stop))]):
                added.append((start, stop))
                chosen += int(self.num_free[index])
                kept.add_within(most, breaks.enclosing.around(start))
                if len(added) == 1 and (block := block_around(start, breaks, half)):
                    kept.add_within(most, [block])
            else:
                skipped += 1
            if kept.size >= most or skipped > _SKIPPED or (enough is not None and chosen >= enough):
                break
        return tuple(added)


def word_scores(
    places: Sequence[TokenArray], starts: npt.NDArray[np.int64], num_free: npt.NDArray[np.int64]
) -> Floats:
    """BM25 of each passage: [passages]. 0: it has no word of the question, or only common ones.

    `places`: for each word the tokens that it begins in. `starts`: the passages' first tokens,
    ascending, the first one 0. `num_free`: how many tokens of each may be chosen; a passage without
    any is no document.
    """
    scores = np.zeros(len(starts))
    is_document = num_free > 0
    count = int(is_document.sum())
    if count == 0:
        return scores
    lengths = num_free / num_free[is_document].mean()
    for at in places:
        within = np.bincount(starts.searchsorted(at, side="right") - 1, minlength=len(starts))
        within = np.where(is_document, within, 0)
        having = int((within > 0).sum())
        if having > max(_FEW, _COMMON * count):
            continue
        rarity = np.log1p((count - having + 0.5) / (having + 0.5))
        most = _SATURATION * (1 - _BY_LENGTH + _BY_LENGTH * lengths)
        scores += rarity * within * (_SATURATION + 1) / (within + most)
    return scores


def fused(first: Floats, second: Floats, weight: float = 1.0) -> Floats:
    """Scores by two scores' orders, highest first: [passages].

    Where the second is 0, it has no opinion. Of equal ones the earlier is better. `weight`: how
    much the first counts.
    """
    by_second = np.where(second > 0, 1 / (_FUSION + _order(second)), 0)
    return weight / (_FUSION + _order(first)) + by_second


def _order(scores: Floats) -> npt.NDArray[np.int64]:
    """The place of each in the order, from 0."""
    order = np.empty(len(scores), dtype=np.int64)
    order[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return order
