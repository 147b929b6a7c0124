"""Which files what was kept of a library's excerpts comes from. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.reports import SourceReport
from gemserve.contract.requests import Request
from gemserve.ranges import as_ranges


def report_sources(
    request: Request, kept: Sequence[int] | None, best: Sequence[tuple[int, int]] = ()
) -> tuple[SourceReport, ...] | None:
    """The sources of the kept positions, each passage on its own, the best first.

    `kept`: ascending; None: everything is kept. `best`: half-open ranges of the passages that were
    chosen, the best first. What is in none of these follows in the order in which its segment was
    found. Returns None if no library was searched.
    """
    if not request.excerpts:
        return None if request.searched is None else ()
    positions = np.arange(len(request.prompt_ids)) if kept is None else np.asarray(kept)
    sources: list[tuple[int, int, SourceReport]] = []
    for excerpt in request.excerpts:
        low, high = positions.searchsorted([excerpt.start, excerpt.stop])
        for start, stop in as_ranges(positions[low:high].tolist()):
            source = _source(request, excerpt, start, stop)
            if source is not None:
                places = (i for i, (low, high) in enumerate(best) if low < stop and start < high)
                sources.append((next(places, len(best)), excerpt.rank, source))
    sources.sort(key=lambda found: found[:2])
    return tuple(source for *_, source in sources)


def _source(request: Request, excerpt: Excerpt, start: int, stop: int) -> SourceReport | None:
    """Where tokens start..stop−1 of the prompt come from; None: they are nothing but blanks."""
    characters, text = excerpt.characters, excerpt.text
    low = int(characters[start - excerpt.start])
    high = len(text) if stop == excerpt.stop else int(characters[stop - excerpt.start])
    passage = text[low:high]
    low += len(passage) - len(passage.lstrip())
    high = low + len(passage.strip())
    if low >= high:
        return None
    lines = None
    if excerpt.kind == "text":
        first = excerpt.first_line + text.count("\n", 0, low)
        lines = first, first + text.count("\n", low, high)
    pages = None
    if excerpt.pages:
        at = excerpt.first_character
        pages = (
            bisect_right(excerpt.pages, at + low),
            bisect_right(excerpt.pages, at + high - 1),
        )
    return SourceReport(
        library=excerpt.library,
        file=excerpt.file,
        heading=_heading(request, excerpt, start) or excerpt.heading or None,
        lines=lines,
        pages=pages,
        characters=(excerpt.first_character + low, excerpt.first_character + high),
        text=text[low:high],
    )


def _heading(request: Request, excerpt: Excerpt, token: int) -> str:
    """The line within the excerpt that encloses a token's line; empty: there is none."""
    for first, stop in request.breaks.enclosing.around(token):
        if excerpt.start <= first and stop <= excerpt.stop:
            low = int(excerpt.characters[first - excerpt.start])
            is_end = stop == excerpt.stop
            high = len(excerpt.text) if is_end else int(excerpt.characters[stop - excerpt.start])
            return excerpt.text[low:high].strip()
    return ""
