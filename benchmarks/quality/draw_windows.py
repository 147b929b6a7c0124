"""Draws how a prompt is read in windows: the picture of docs/filtering.md.

    python benchmarks/quality/draw_windows.py docs/pictures/windows.png

It is a drawing: its lengths and scores are made up.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

LENGTHS = (11.0, 14.0, 9.0, 13.0, 10.0, 12.0)  # of the segments
GROUPS = ((0, 1, 2), (3, 4, 5))
CACHED = 1  # this segment is found in the document cache
FIRST, LAST, QUESTION, ANCHOR = 11.0, 3.0, 8.0, 2.5
KEPT = ((17.0, 22.0), (37.0, 41.5), (61.5, 66.0))  # of the document
FIRM, DOCUMENT, ASKED, SINK = "#9aa0a6", "#d8e6f5", "#3b78c2", "#e6a23c"
MARKED, INK, FAINT = "#7fb069", "#202124", "#5f6368"
HEIGHT = 2.2


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(10.5, 6.4), dpi=110)
    axes.set_xlim(-1, 101)
    axes.set_ylim(0, 59)
    axes.axis("off")
    _draw_prompt(axes, 53)
    _draw_passes(axes, 43)
    _draw_scores(axes, 11.5)
    _draw_answer(axes, 2)
    figure.savefig(path, bbox_inches="tight", facecolor="white")


def _box(axes: Any, x: float, y: float, width: float, color: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), width, HEIGHT, facecolor=color, edgecolor=INK, lw=0.7))
    dark = color in (ASKED,)
    style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "white" if dark else INK}
    axes.text(x + width / 2, y + HEIGHT / 2, text, **style)


def _say(axes: Any, x: float, y: float, text: str, *, bold: bool = False) -> None:
    axes.text(
        x,
        y,
        text,
        fontsize=9.5 if bold else 8.5,
        weight="bold" if bold else "normal",
        color=INK if bold else FAINT,
        va="center",
    )


def _draw_prompt(axes: Any, y: float) -> None:
    _say(axes, 0, y + 4, "1. The prompt is cut by content", bold=True)
    _box(axes, 0, y, FIRST, FIRM, "instructions")
    for number, (start, length) in enumerate(_segments()):
        _box(axes, FIRST + start, y, length, DOCUMENT, f"window {number + 1}")
    end = FIRST + sum(LENGTHS)
    _box(axes, end, y, QUESTION, ASKED, "question")
    _box(axes, end + QUESTION, y, LAST, FIRM)
    _say(axes, 0, y - 1.6, "always read")
    _say(axes, end, y - 1.6, "always read")
    note = "documents: a long text is mostly cut at the same places, wherever it stands"
    _say(axes, FIRST, y - 1.6, note)


def _draw_passes(axes: Any, y: float) -> None:
    title = "2. The lower layers read each window alone, then the question behind it"
    _say(axes, 0, y + 4, title, bold=True)
    at, right = y, ANCHOR + max(LENGTHS) + QUESTION
    for number, group in enumerate(GROUPS):
        top = at + HEIGHT
        for index in group:
            _box(axes, 0, at, ANCHOR, SINK)
            _box(axes, ANCHOR, at, LENGTHS[index], DOCUMENT, f"window {index + 1}")
            if index == CACHED:
                size = ANCHOR + LENGTHS[index], HEIGHT
                hatched = Rectangle((0, at), *size, fill=False, hatch="///", ec="#b9c4d0", lw=0)
                axes.add_patch(hatched)
                _say(
                    axes, right + 12, at + HEIGHT / 2, "found in the document cache: not read again"
                )
            _box(axes, ANCHOR + LENGTHS[index], at, QUESTION, ASKED, "question")
            at -= HEIGHT + 1.1
        bottom = at + HEIGHT + 1.1
        axes.plot([right + 1.5, right + 2.3, right + 2.3, right + 1.5], [top, top, bottom, bottom],
                  color=FAINT, lw=1)  # fmt: skip
        _say(axes, right + 3.2, (top + bottom) / 2, f"group {number + 1}")
        if number == 0:
            told = "one pass reads the question behind all windows of a group"
            _say(axes, right + 12, bottom + HEIGHT / 2, told)
        at -= 1.4
    bottom = at + HEIGHT + 2.5
    _box(axes, right + 12, bottom, ANCHOR, SINK)
    told = "anchor: the beginning of the chat template, the same before every window"
    _say(axes, right + 12 + ANCHOR + 1, bottom + HEIGHT / 2, told)


def _draw_scores(axes: Any, y: float) -> None:
    _say(axes, 0, y + 8.2, "3. All tokens are ranked together", bold=True)
    told = "score: the question's attention to a token, beside that to its own window's anchor"
    _say(axes, 35, y + 8.2, told)
    places = np.arange(0, sum(LENGTHS), 0.25)
    rng = np.random.default_rng(3)
    scores = rng.gamma(1.2, 0.35, len(places))
    for start, stop in KEPT:
        is_near = (places >= start) & (places < stop)
        scores[is_near] += rng.gamma(5, 0.75, is_near.sum())
    scores = np.minimum(scores, 6.5)
    colors = [MARKED if any(a <= p < b for a, b in KEPT) else "#b5c9de" for p in places]
    axes.bar(FIRST + places, scores, 0.2, bottom=y, color=colors, align="edge")
    axes.plot([FIRST, FIRST + sum(LENGTHS)], [y, y], color=INK, lw=0.7)
    for start, _ in (*_segments(), (sum(LENGTHS), 0.0)):
        axes.plot([FIRST + start] * 2, [y, y + 6.8], color=FAINT, lw=0.7, ls=":")
    _say(
        axes,
        FIRST,
        y - 1.3,
        "no window has a share of its own: the best passages win, wherever they are",
    )


def _draw_answer(axes: Any, y: float) -> None:
    title = "4. All layers read what is kept, as one text from position 0, and answer"
    _say(axes, 0, y + 4, title, bold=True)
    _box(axes, 0, y, FIRST, FIRM, "instructions")
    at = FIRST
    for start, stop in KEPT:
        _box(axes, at, y, stop - start, MARKED, "kept")
        at += stop - start
    _box(axes, at, y, QUESTION, ASKED, "question")
    _box(axes, at + QUESTION, y, LAST, FIRM)
    at += QUESTION + LAST
    _say(axes, at + 2, y + HEIGHT / 2, "only this, and the answer, must fit into the context")


def _segments() -> list[tuple[float, float]]:
    """Where each segment begins in the document, and how long it is."""
    stops = list(accumulate(LENGTHS))
    return [(stop - length, length) for stop, length in zip(stops, LENGTHS, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the PNG file to write")
    draw(parser.parse_args().path)


if __name__ == "__main__":
    main()
