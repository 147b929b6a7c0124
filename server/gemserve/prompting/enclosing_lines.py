"""Finds which line encloses each line of a text: the heading of its section, `def …` of its block.

What encloses a line is the nearest earlier one that is less indented; of a line without indentation
it is the nearest Markdown heading, and of a heading one of a higher level. So nothing need be known
of any language.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.contract.prompt_parts import EnclosingLines
from gemserve.prompting.encoding import IntArray
from gemserve.prompting.text_lines import Bools, Lines

MOST_TOKENS = 24  # of a line that encloses others; prose has longer ones
_LEVELS = 6  # of headings


def find_enclosing(lines: Lines, edges: IntArray, stops: IntArray) -> EnclosingLines:
    """`edges`, `stops`: the first token of each line, and the one behind its last: [lines]."""
    levels = _headings(lines)
    solid = np.flatnonzero(~lines.is_blank)
    if len(solid) == 0:
        return EnclosingLines()
    runs = _Runs.of(lines, levels, solid)
    last = runs.lasts
    says_something = lines.has_word[last] & ((levels[last] > 0) | ~lines.ends_sentence[last])
    sizes = stops[last] - edges[last]
    can_enclose = says_something & (sizes > 0) & (sizes <= MOST_TOKENS)
    nearest = _nearest(runs, can_enclose, can_enclose & lines.ends_colon[last])
    # blank lines belong to what follows them
    behind = np.append(-1, runs.lasts[:-1]) + 1
    is_in_text = lines.texts[np.minimum(behind, runs.firsts)] == lines.texts[runs.firsts]
    starts = edges[np.where(is_in_text, behind, runs.firsts)]
    is_new = np.append(nearest[0] >= 0, nearest[1:] != nearest[:-1])
    starts, nearest = starts[is_new], nearest[is_new]
    at = runs.lasts[nearest]
    return EnclosingLines(
        starts=starts.astype(np.uint32),
        line_starts=np.where(nearest < 0, 0, edges[at]).astype(np.uint32),
        line_stops=np.where(nearest < 0, 0, stops[at]).astype(np.uint32),
        is_heading=((nearest >= 0) & (levels[at] > 0)).astype(np.uint32),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Consecutive lines with the same indentation, without blank ones: [runs] each.

    `firsts`, `lasts`: the numbers of lines. `depths`: twice the columns of indentation, one more
    for list items; below 0 for headings, the lowest for the highest level. `begins_text`: nothing
    before encloses it. `continues`: the line of the same depth before it encloses it, as `def f(`
    does `) -> int:`.
    """

    firsts: IntArray
    lasts: IntArray
    depths: IntArray
    begins_text: Bools
    continues: Bools

    @staticmethod
    def of(lines: Lines, levels: npt.NDArray[np.int64], solid: IntArray) -> _Runs:
        """`levels`: of headings, 0 for other lines. `solid`: the lines that are not blank."""
        of_level = levels[solid]
        # YAML indents the items of a list under its key, or does not
        indented = 2 * lines.columns[solid] + lines.begins_item[solid]
        depths = np.where(of_level > 0, of_level - _LEVELS - 1, indented)
        is_first = np.diff(lines.texts[solid], prepend=-1) != 0
        is_same = (np.diff(depths, prepend=-1 - _LEVELS) == 0) & ~is_first
        has_word = lines.has_word[solid]
        opens = lines.begins_open[solid] & ~has_word
        opens &= is_same & np.append(False, has_word[:-1])
        continues = lines.begins_closing[solid] | opens
        begins = ~is_same | continues | np.append(False, continues[:-1]) | (of_level > 0)
        at = np.flatnonzero(begins)
        return _Runs(
            firsts=solid[at],
            lasts=solid[np.append(at[1:], len(solid)) - 1],
            depths=depths[at],
            begins_text=is_first[at],
            continues=continues[at],
        )


def _nearest(runs: _Runs, can_enclose: Bools, announces: Bools) -> IntArray:
    """For each run the nearest one that encloses it and may be kept with it, or −1: [runs].

    `announces`: which may be kept with list items that are indented no more than they are.
    """
    depths, usable, usable_beside = (
        each.tolist() for each in (runs.depths, can_enclose, announces)
    )
    nearest: list[int] = []
    around: list[int] = []  # what may enclose the next run, outermost first
    rows = zip(depths, runs.begins_text.tolist(), runs.continues.tolist(), strict=True)
    for run, (depth, begins_text, continues) in enumerate(rows):
        if begins_text:
            around.clear()
        outside = depth + 1 if continues else depth
        while around and depths[around[-1]] >= outside:
            around.pop()
        parent = around[-1] if around else -1
        if parent >= 0:
            is_beside = depth > 0 and depth % 2 and depths[parent] == depth - 1
            if not (usable_beside if is_beside else usable)[parent]:
                parent = nearest[parent]
        nearest.append(parent)
        around.append(run)
    return np.array(nearest, dtype=np.int64)


def _headings(lines: Lines) -> npt.NDArray[np.int64]:
    """The level of each line that is a heading, 1 to 6, or 0: [lines].

    Comments of a program look like headings. They stand in rows, or above what they explain: a
    heading has none of its own level beside it, and one of level 1 a blank line behind it.
    """
    levels, texts = lines.levels, lines.texts
    next_level, is_end = np.append(levels[1:], 0), np.append(texts[1:] != texts[:-1], True)
    has_blank = np.append(lines.is_blank[1:], True) | is_end
    is_alone = (levels != next_level) | is_end
    is_alone[1:] &= (levels[1:] != levels[:-1]) | is_end[:-1]
    is_heading = (levels > 0) & is_alone & ((levels > 1) | has_blank | (next_level > 0))
    return np.where(is_heading & ~_is_fenced(lines), levels, 0)


def _is_fenced(lines: Lines) -> Bools:
    """Which lines are in a fenced code block: [lines]. One without an end ends with its text."""
    at = np.flatnonzero(lines.fences)
    edges = np.zeros(len(lines.texts) + 1, dtype=np.int64)
    opened, text, stop = 0, -1, 0
    columns = (at, lines.fences[at], lines.is_bare[at], lines.texts[at])
    for line, fence, is_bare, number in zip(*(c.tolist() for c in columns), strict=True):
        if number != text:
            if opened:
                edges[stop] -= 1
            text, opened = number, 0
            stop = int(lines.texts.searchsorted(text, side="right"))
        if not opened:
            opened = fence
            edges[line] += 1
        elif is_bare and fence * opened > 0 and abs(fence) >= abs(opened):
            opened = 0
            edges[line] -= 1
    if opened:
        edges[stop] -= 1
    return edges[:-1].cumsum() > 0
