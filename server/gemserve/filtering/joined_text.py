"""Joins the kept tokens of a prompt to the text that the answer is generated from.

Passages that were not neighbours are separated, so that none reads as the other's continuation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.types import Separators, TextBreaks, TokenArray


@dataclass(frozen=True, slots=True)
class JoinedText:
    """`ids`: what is read. `added`: which of them, by index, are not of the prompt; ascending."""

    ids: list[int]
    added: tuple[int, ...] = ()


def join_text(
    tokens: TokenArray,
    positions: Sequence[int],
    breaks: TextBreaks,
    is_document: npt.NDArray[np.bool_],
    separators: Separators,
) -> JoinedText:
    """The prompt's `tokens` at ascending `positions`, with separators between passages.

    There is one between two kept tokens of documents that are not neighbours. `is_document`:
    [tokens], False for what is always read, which has line ends of its own.
    """
    at = np.asarray(positions, dtype=np.int64)
    ids: list[int] = tokens[at].tolist()
    if not separators.blank_line or len(at) < 2:
        return JoinedText(ids)
    of_document = is_document[at]
    is_gap = (np.diff(at) > 1) & of_document[:-1] & of_document[1:]
    joined: list[int] = []
    added: list[int] = []
    start = 0
    for last in np.flatnonzero(is_gap).tolist():
        following = int(at[last]) + 1
        joined += ids[start : last + 1]
        start = last + 1
        if _is_in(following, breaks.paragraphs):
            continue
        ends_line = _is_in(following, breaks.lines)
        between = separators.line_end if ends_line else separators.blank_line
        added += range(len(joined), len(joined) + len(between))
        joined += between
    return JoinedText([*joined, *ids[start:]], tuple(added))


def _is_in(position: int, ascending: Sequence[int]) -> bool:
    at = bisect_left(ascending, position)
    return at < len(ascending) and ascending[at] == position
