"""Joins the kept tokens of a prompt to the text that the answer is generated from.

Passages that were not neighbours are separated, so that none reads as the other's continuation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.contract.prompt_parts import Separators, TextBreaks, TokenArray


@dataclass(frozen=True, slots=True)
class JoinedText:
    """`ids`: what is read. `added`: which of them, by index, are not of the prompt; ascending."""

    ids: list[int]
    added: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gaps:
    """What stands between kept tokens of a prompt that are not neighbours.

    `is_document`: [tokens], False for what is always read, which has line ends of its own.
    """

    breaks: TextBreaks
    is_document: npt.NDArray[np.bool_]
    separators: Separators

    def between(self, last: int, first: int) -> tuple[int, ...]:
        """The token ids between the kept tokens `last` and `first`, if they are of documents.

        A blank line, or as much of one as is not kept. A line that encloses what follows, such as a
        heading, is on the line before it.
        """
        if first <= last + 1 or not (self.is_document[last] and self.is_document[first]):
            return ()
        # a token of `with_line_end` ends the line before it, and begins the one behind it
        num_ends = self._num_ends(last + 1)
        if self.breaks.is_with_line_end(first):
            num_ends += self._num_ends(first + 1)
        if num_ends < 2 and self._encloses(last, first):
            return self.separators.line_end if num_ends == 0 else ()
        return (self.separators.blank_line, self.separators.line_end, ())[min(num_ends, 2)]

    def num_between(self, last: int, first: int) -> int:
        return len(self.between(last, first))

    def _num_ends(self, token: int) -> int:
        """Line ends in front of this token; 2 stands for any blank line."""
        if _is_in(token, self.breaks.paragraphs):
            return 2
        return int(_is_in(token, self.breaks.lines))

    def _encloses(self, last: int, first: int) -> bool:
        return any(stop == last + 1 for _, stop in self.breaks.enclosing.around(first)[:1])


def join_text(tokens: TokenArray, positions: Sequence[int], gaps: Gaps) -> JoinedText:
    """The prompt's `tokens` at ascending `positions`, with separators between passages."""
    at = np.asarray(positions, dtype=np.int64)
    ids: list[int] = tokens[at].tolist()
    joined: list[int] = []
    added: list[int] = []
    start = 0
    for last in np.flatnonzero(np.diff(at) > 1).tolist():
        between = gaps.between(int(at[last]), int(at[last + 1]))
        joined += ids[start : last + 1]
        start = last + 1
        added += range(len(joined), len(joined) + len(between))
        joined += between
    return JoinedText([*joined, *ids[start:]], tuple(added))


def _is_in(position: int, ascending: Sequence[int]) -> bool:
    at = bisect_left(ascending, position)
    return at < len(ascending) and ascending[at] == position
