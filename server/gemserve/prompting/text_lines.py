"""The lines of texts, with what their structure shows: indentation, headings and brackets.

All that is known of a line follows from a few of its characters, never from words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from gemserve.prompting.encoding import IntArray

Bools = npt.NDArray[np.bool_]
_Codes = npt.NDArray[np.uint32]


def _codes(text: str) -> _Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


_PIECE = 1 << 15  # characters; what reads them holds the interpreter lock
_TAB = 8  # columns
_END, _SPACE, _HASH = map(ord, "\n #")
_OTHER_BLANKS = _codes("\u00a0\u3000")
_FIRST_LETTER = 0x80  # from here on most characters are letters
_SENTENCE_ENDS = _codes(".!?…。！？")
_CLOSING_QUOTES = _codes("\"'”’»")
_OPENING = _codes("{[(")
_CLOSING = _codes("}])")
_COLONS = _codes(":：")
_TICK, _TILDE = map(ord, "`~")
_LONGEST_FENCE = 16


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of texts in a row: [lines] each.

    `starts`, `stops`: half-open ranges of characters; the stop is behind the line's end. `firsts`:
    the first character that is not blank, or the stop. `lasts`: behind the last character so far
    that is not blank. `texts`: the number of the text. `columns`: how wide the indentation is.
    `levels`: how many `#` begin what looks like a heading, or 0. `fences`: how many backticks begin
    what looks like the fence of a code block, below 0 if they are tildes, or 0. `is_bare`: nothing
    follows these. The others say how a line begins or ends, and what is in it.
    """

    starts: IntArray
    stops: IntArray
    firsts: IntArray
    lasts: IntArray
    texts: IntArray
    columns: IntArray
    levels: IntArray
    fences: IntArray
    is_blank: Bools
    is_bare: Bools
    ends_sentence: Bools
    ends_colon: Bools
    begins_item: Bools
    begins_open: Bools
    begins_closing: Bools
    has_word: Bools


def find_lines(texts: Sequence[tuple[int, str]]) -> Lines:
    """The lines of texts, each with the offset of its first character; ascending."""
    whole = texts[0][1] if len(texts) == 1 else "\n".join(text for _, text in texts)
    lengths = np.array([len(text) for _, text in texts], dtype=np.int64)
    offsets = np.array([at for at, _ in texts], dtype=np.int64)
    begins = np.cumsum(lengths + 1) - lengths - 1
    parts = [_lines_of(whole, *piece) for piece in _pieces(whole)]
    columns = {
        each.name: np.concatenate([getattr(part, each.name) for part in parts])
        for each in fields(Lines)
    }
    number = np.searchsorted(begins, columns["starts"], side="right") - 1
    moved = (offsets - begins)[number]
    ends = begins[number] + lengths[number]  # the line end between two texts is of none
    stops, firsts = (np.minimum(columns[name], ends) for name in ("stops", "firsts"))
    lasts = np.maximum.accumulate(columns["lasts"])
    moves = {"starts": columns["starts"], "stops": stops, "firsts": firsts, "lasts": lasts}
    return Lines(
        **columns | {name: values + moved for name, values in moves.items()} | {"texts": number}
    )


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Whole lines of a text, together of about `_PIECE` characters."""
    start = 0
    while start < len(text) or start == 0:
        stop = len(text)
        if stop - start > _PIECE:
            stop = text.rfind("\n", start, start + _PIECE) + 1
            stop = stop or text.find("\n", start + _PIECE) + 1 or len(text)
        yield start, stop
        start = max(stop, 1)


def _lines_of(text: str, start: int, stop: int) -> Lines:
    """The lines of a piece. Of a line that is longer than one, only the beginning is looked at."""
    codes = _codes(text[start : min(stop, start + _PIECE)])
    starts = np.append(0, np.flatnonzero(codes == _END) + 1)
    if len(starts) > 1 and starts[-1] == stop - start:
        starts = starts[:-1]
    stops = np.append(starts[1:], len(codes))
    is_solid = (codes > _SPACE) & ~np.isin(codes, _OTHER_BLANKS)
    solid = np.flatnonzero(is_solid)
    # behind the end nothing is looked up, so that an index there finds a blank
    padded = np.append(codes, np.full(1 + _LONGEST_FENCE, _SPACE, dtype=np.uint32))
    edges = np.append(solid, len(codes))
    low, high = solid.searchsorted(starts), solid.searchsorted(stops)
    firsts, is_blank = np.minimum(edges[low], stops), low == high
    lasts = np.where(high > 0, edges[high - 1] + 1, 0)
    tabs = np.append(0, np.cumsum(codes == ord("\t")))
    first, last, before = padded[firsts], padded[lasts - 1], padded[lasts - 2]
    fences = _fences(padded, firsts, stops)
    is_quoted = np.isin(last, _CLOSING_QUOTES) & (lasts - firsts > 1)
    words = np.flatnonzero(_is_word(codes))
    if len(codes) < stop - start:
        stops[-1] = lasts[-1] = stop - start
    return Lines(
        starts=starts + start,
        stops=stops + start,
        firsts=firsts + start,
        lasts=lasts + start,
        texts=np.zeros(len(starts), dtype=np.int64),
        columns=firsts - starts + (_TAB - 1) * (tabs[firsts] - tabs[starts]),
        levels=_levels(padded, starts, lasts),
        fences=fences,
        is_blank=is_blank,
        is_bare=lasts - firsts == np.abs(fences),
        ends_sentence=np.isin(np.where(is_quoted, before, last), _SENTENCE_ENDS),
        ends_colon=np.isin(last, _COLONS),
        begins_item=(first == ord("-")) & (padded[firsts + 1] == _SPACE),
        begins_open=np.isin(first, _OPENING),
        begins_closing=np.isin(first, _CLOSING),
        has_word=words.searchsorted(starts) < words.searchsorted(stops),
    )


def _is_word(codes: _Codes) -> Bools:
    lower = codes | 0x20
    is_letter = (lower >= ord("a")) & (lower <= ord("z")) & (codes < _FIRST_LETTER)
    is_digit = (codes >= ord("0")) & (codes <= ord("9"))
    return is_letter | is_digit | (codes >= _FIRST_LETTER)


def _levels(padded: _Codes, starts: IntArray, lasts: IntArray) -> IntArray:
    """How many `#` begin each line, if there are one to six, a blank and something else."""
    levels = np.zeros(len(starts), dtype=np.int64)
    at = np.flatnonzero(padded[starts] == _HASH)
    count = _repeated(padded, starts[at], 7)
    behind = padded[starts[at] + count]
    is_heading = (count <= 6) & ((behind == _SPACE) | (behind == ord("\t")))
    is_heading &= lasts[at] > starts[at] + count
    levels[at] = np.where(is_heading, count, 0)
    return levels


def _fences(padded: _Codes, firsts: IntArray, stops: IntArray) -> IntArray:
    """See `Lines.fences`. What has more backticks further on is code within a line."""
    fences = np.zeros(len(firsts), dtype=np.int64)
    ticks = np.flatnonzero(padded == _TICK)
    for sign, code in ((1, _TICK), (-1, _TILDE)):
        at = np.flatnonzero(padded[firsts] == code)
        count = _repeated(padded, firsts[at], _LONGEST_FENCE)
        is_fence = count >= 3
        if code == _TICK:
            is_fence &= ticks.searchsorted(stops[at]) - ticks.searchsorted(firsts[at]) == count
        fences[at] = np.where(is_fence, sign * count, 0)
    return fences


def _repeated(padded: _Codes, at: IntArray, most: int) -> IntArray:
    """How often the characters at these places follow themselves there, `most` at most."""
    count = np.ones(len(at), dtype=np.int64)
    for _ in range(most - 1 if len(at) else 0):
        count += padded[at + count] == padded[at]
    return count
