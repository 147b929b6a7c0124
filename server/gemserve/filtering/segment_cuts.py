"""Cuts the documents of a prompt into segments, which a filter reads one by one. No torch.

Where a document is cut depends on its own tokens alone, as in rsync and restic: a range is cut at
the place whose neighbouring tokens have the smallest hash, and then both parts in the same way,
until each is short enough. So an inserted line changes the segment that it is in, and the others
are found again wherever they stand.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gemserve.contract.filter_plan import Segment
from gemserve.contract.prompt_parts import ProtectedRange, TextBreaks, TokenArray

# A range of so few tokens is read together with the next one, if little is between them. A longer
# one is found again alone, in whatever order documents come.
_SHORT = 256
_BETWEEN = 64
_BLANKS = 4  # tokens
_NEAR = 8  # tokens on either side of a place, by which it is chosen
_EDGE = 1 / 4  # of the longest segment: a part is not made shorter than this

Range = tuple[int, int]


def cut_segments(
    tokens: TokenArray,
    ranges: Sequence[Range],
    breaks: TextBreaks,
    size: int,
    anchor: Sequence[int] = (),
    fixed: Sequence[Range] = (),
) -> tuple[Segment, ...]:
    """Segments of at most `size` tokens that together are `ranges`, in the order of the text.

    They begin at paragraphs; within long ones at sentences, then at lines, then anywhere. `anchor`:
    what each segment begins with, which is part of its name. `fixed`: ranges that are a segment
    each, as they were cut before; of the few tokens between two of them there is none.
    """
    hashes = _hashes(tokens)
    levels = [
        np.asarray(level, dtype=np.int64)
        for level in (breaks.paragraphs, breaks.sentences, breaks.lines)
    ]
    segments: list[Segment] = []
    firm = frozenset(fixed)
    for whole in ranges:
        unfinished = _around(whole, fixed)[::-1]
        while unfinished:
            start, stop = unfinished.pop()
            if stop - start > size and (start, stop) not in firm:
                at = _place(start, stop, levels, hashes, max(1, int(_EDGE * size)))
                unfinished += [(at, stop), (start, at)]
                continue
            name = segment_name(tokens[start:stop], anchor)
            segments.append(Segment(start=start, stop=stop, name=name))
    return tuple(segments)


def segment_name(tokens: TokenArray, anchor: Sequence[int]) -> bytes:
    """The name of a segment with these tokens, behind this anchor."""
    first = np.asarray(anchor, dtype=np.int64).tobytes()
    text = np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(first + text, digest_size=16).digest()


def _around(whole: Range, fixed: Sequence[Range]) -> list[Range]:
    """The parts of a range: those that are `fixed`, and what is beside them."""
    start, end = whole
    inner = sorted(each for each in fixed if start <= each[0] and each[1] <= end)
    parts: list[Range] = []
    for low, high in [*inner, (end, end)]:
        # between two segments of different files are a few blank lines
        if low - start > (_BLANKS if inner else 0):
            parts.append((start, low))
        if high > low:
            parts.append((low, high))
        start = high
    return parts


def document_ranges(
    protected: Sequence[ProtectedRange], question: Sequence[Range], num_tokens: int
) -> list[Range]:
    """The ranges of a prompt that a filter reads: all but what is always read.

    Short ones with little between them are joined, so that short messages are read in one segment.
    The question is never between them.
    """
    firm = sorted((r.start, r.stop) for r in protected if r.is_always_read)
    found: list[Range] = []
    end = 0
    for start, stop in [*firm, (num_tokens, num_tokens)]:
        if start > end:
            found.append((end, min(start, num_tokens)))
        end = max(end, stop)
    joined: list[Range] = []
    for start, stop in found:
        is_short = bool(joined) and joined[-1][1] - joined[-1][0] < _SHORT
        if is_short and start - joined[-1][1] <= _BETWEEN:
            gap = joined[-1][1], start
            if not any(low < gap[1] and high > gap[0] for low, high in question):
                joined[-1] = joined[-1][0], stop
                continue
        joined.append((start, stop))
    return joined


def _place(
    start: int,
    stop: int,
    levels: Sequence[npt.NDArray[np.int64]],
    hashes: npt.NDArray[np.uint64],
    edge: int,
) -> int:
    """Where to cut start..stop−1: at the smallest hash; among equal ones, next to the middle."""
    low, high = start + edge, stop - edge
    for level in levels:
        places = level[bisect_left(level, low) : bisect_left(level, high + 1)]
        if len(places):
            return _smallest(places, hashes[places], (start + stop) // 2)
    return _smallest(np.arange(low, high + 1), hashes[low : high + 1], (start + stop) // 2)


def _smallest(places: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], middle: int) -> int:
    best = places[hashes == hashes.min()]
    return int(best[np.abs(best - middle).argmin()])


def _hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """A hash of the tokens around each place: [tokens + 1], where beyond the ends are zeros."""
    factors = np.random.default_rng(0).integers(1, 1 << 63, 2 * _NEAR, dtype=np.uint64) | np.uint64(
        1
    )
    padded = np.concatenate([np.zeros(_NEAR), tokens, np.zeros(_NEAR)]).astype(np.uint64)
    total = np.zeros(len(tokens) + 1, dtype=np.uint64)
    for offset, factor in enumerate(factors):
        total += (padded[offset : offset + len(total)] + np.uint64(1)) * factor
    total ^= total >> np.uint64(31)
    total *= np.uint64(0x9E3779B97F4A7C15)
    return total ^ (total >> np.uint64(29))
