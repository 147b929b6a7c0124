"""Finds where paragraphs, sentences and lines begin: a filter should keep whole ones."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gemserve.types import TextBreaks

_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")
# A space belongs to the token behind it, so a sentence begins with the space in front of it.
_SENTENCE = re.compile(
    r"[.!?…][\"'”’»)\]]*(?=\s+[^a-z\s])|[。！？]|\n(?=[^\S\n]*(?:[-*•#>]|\d+[.)]))"
)
_LINE = re.compile(r"\n")


def find_breaks(texts: Sequence[tuple[int, str]], starts: Sequence[int]) -> TextBreaks:
    """The tokens that begin a paragraph, a sentence or list item, and a line.

    `texts`: the messages, or a text as a whole, each with the offset of its first character; each
    begins a paragraph. `starts`: the character at which each token begins, ascending.
    """

    def tokens(pattern: re.Pattern[str]) -> tuple[int, ...]:
        found = {
            bisect_left(starts, at + m.end()) for at, text in texts for m in pattern.finditer(text)
        }
        found.discard(len(starts))
        return tuple(sorted(found))

    edges = {bisect_left(starts, c) for at, text in texts for c in (at, at + len(text))}
    edges.discard(len(starts))
    return TextBreaks(
        paragraphs=tuple(sorted({*tokens(_PARAGRAPH), *edges})),
        sentences=tokens(_SENTENCE),
        lines=tokens(_LINE),
    )


def find_breaks_of_ids(tokenizer: Any, ids: Sequence[int]) -> TextBreaks:
    """The breaks of a prompt of token ids; none where an id is no token."""
    distinct = sorted(set(ids))
    try:
        backend = tokenizer.backend_tokenizer
        decoded: list[str] = backend.decode_batch(
            [[i] for i in distinct], skip_special_tokens=False
        )
    except OverflowError:  # an id that no tokenizer can have
        return TextBreaks()
    text_of = dict(zip(distinct, decoded, strict=True))
    texts = [text_of[i] for i in ids]
    starts = list(accumulate((len(text) for text in texts), initial=0))[:-1]
    return find_breaks([(0, "".join(texts))], starts)
