"""Cuts a file's text into segments, by content: a changed line changes the segment that it is in.

A long text is first cut into sections, at paragraphs whose own first characters decide. So the work
and the memory for a file of any length are those of a section, and a section behind a change is
found again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from gemserve.contract.prompt_parts import TextBreaks, TokenArray
from gemserve.files.file_text import FileText
from gemserve.filtering.segment_cuts import cut_segments, segment_name
from gemserve.prompting.encoding import encode, token_edges
from gemserve.prompting.excerpt_tokens import encode_alone
from gemserve.prompting.text_breaks import find_breaks
from gemserve_library.library import StoredSegment

_SECTION = 1 << 17  # characters of a section at least; most have twice as many
_LONGEST = 1 << 19
_ONE_IN = 64  # of the paragraphs begins a section
_NEAR = 64  # characters that decide whether a paragraph does
_HEADING_CHARS = 120
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutSegment:
    """A segment, and its tokens as they are when its text is read alone."""

    segment: StoredSegment
    tokens: TokenArray


def cut_file(
    tokenizer: Any, file: FileText, anchor: Sequence[int], size: int
) -> Iterator[CutSegment]:
    """The segments of a file, of at most about `size` tokens each, in order."""
    line, counted = 1, 0
    for start, stop in sections(file.text):
        for low, high, heading, tokens in _section(tokenizer, file.text[start:stop], anchor, size):
            at = start + low
            line += file.text.count("\n", counted, at)
            counted = at
            segment = StoredSegment(
                name=segment_name(tokens, anchor),
                num_tokens=len(tokens),
                start=at,
                line=line,
                heading=heading,
                text=file.text[at : start + high],
            )
            yield CutSegment(segment=segment, tokens=tokens)


def sections(text: str) -> Iterator[tuple[int, int]]:
    """The half-open ranges of characters that are cut on their own."""
    start = 0
    while len(text) - start > _LONGEST:
        stop = _end_of_section(text, start)
        yield start, stop
        start = stop
    yield start, len(text)


def _end_of_section(text: str, start: int) -> int:
    for match in _PARAGRAPH.finditer(text, start + _SECTION, start + _LONGEST):
        near = text[match.end() : match.end() + _NEAR]
        if crc32(near.encode("utf-8", "surrogatepass")) % _ONE_IN == 0:
            return match.end()
    # no paragraph says so: the last place where a line begins, as a text without lines has none
    cut = text.rfind("\n", start + _SECTION, start + _LONGEST) + 1
    return cut or start + _LONGEST


def _section(
    tokenizer: Any, text: str, anchor: Sequence[int], size: int
) -> Iterator[tuple[int, int, str, TokenArray]]:
    """Of each segment of a section its range of characters, its heading and its tokens."""
    encoding = encode(tokenizer, text, add_special_tokens=False)
    if not len(encoding):
        return
    ids = np.array(encoding.ids, dtype=np.int64)
    starts = token_edges(encoding)[0]
    breaks = find_breaks([(0, text)], starts)
    # of tokens that are one character together, a segment begins with the first
    segments = cut_segments(ids, [(0, len(ids))], breaks, size, anchor)
    edges = [int(starts[segment.start]) for segment in segments] + [len(text)]
    edges[0] = 0
    for segment, low, high in zip(segments, edges[:-1], edges[1:], strict=True):
        part = text[low:high]
        if not part.strip():
            continue
        tokens = np.array(encode_alone(tokenizer, part).ids, dtype=np.int64)
        yield low, high, _heading(text, starts, breaks, segment.start), tokens


def _heading(text: str, starts: Any, breaks: TextBreaks, token: int) -> str:
    """The lines that enclose the segment's first one, the outermost first."""
    lines = []
    for first, stop in reversed(breaks.enclosing.around(token)):
        end = int(starts[stop]) if stop < len(starts) else len(text)
        lines.append(text[int(starts[first]) : end].strip())
    return " › ".join(lines)[:_HEADING_CHARS]
