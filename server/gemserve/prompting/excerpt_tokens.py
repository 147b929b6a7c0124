"""Gives the parts of a text that a library has read the tokens that they have when read alone.

A segment is found in the document cache by its tokens, and those at its edges would depend on the
text beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemserve.contract.prompt_parts import Excerpt
from gemserve.prompting.control_tokens import spell_out
from gemserve.prompting.encoding import IntArray, TokenOffsets, encode, token_edges
from gemserve.ranges import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpts:
    """`text` has the text of each of `parts`, in this order, at the characters `places`.

    The ranges of tokens of the parts are set when a prompt is made of them.
    """

    text: str
    places: tuple[tuple[int, int], ...]
    parts: tuple[Excerpt, ...]


NO_EXCERPTS = Excerpts(text="", places=(), parts=())


def encode_alone(tokenizer: Any, text: str) -> Any:
    """The encoding of a part on its own, in which nothing is a control token."""
    encoding = encode(tokenizer, text, add_special_tokens=False)
    return spell_out(tokenizer, text, encoding, [(0, 0, len(text))])


def find_places(text: str, excerpts: str, places: Ranges) -> Ranges:
    """Where the parts of `excerpts` at `places` are in a prompt's text that has all of them.

    Templates may cut blanks at the ends. Empty: they are not there.
    """
    at = text.rfind(excerpts) if excerpts else -1
    if at >= 0:  # whole, so the first and the last part have the tokens that they had when read
        return tuple((at + low, at + high) for low, high in places)
    inner = excerpts.strip()
    at = text.rfind(inner)
    if not inner or at < 0:
        return ()
    before = len(excerpts) - len(excerpts.lstrip())
    stop = at + len(inner)
    return tuple(
        (max(at, at + low - before), min(stop, at + high - before)) for low, high in places
    )


def with_parts(tokenizer: Any, text: str, encoding: Any, places: Ranges) -> tuple[Any, Ranges]:
    """`encoding` of `text` with each place encoded alone, and the places' ranges of tokens."""
    starts, ends = token_edges(encoding)
    ids = np.array(encoding.ids, dtype=np.int64)
    joined = _Joined()
    at = 0
    tokens: list[tuple[int, int]] = []
    for low, high in [*places, (len(text), len(text) + 1)]:
        # tokens without text stand where they stood: a BOS in front, and what is behind the end
        first = int(ends.searchsorted(at, side="right" if at else "left"))
        last = int(starts.searchsorted(low, side="left")) if low < len(text) else len(ids)
        while last > first and ends[last - 1] > low:
            last -= 1
        while first < last and starts[first] < at:
            first += 1
        left = int(starts[first]) if first < last else low
        right = int(ends[last - 1]) if first < last else low
        joined.add_text(tokenizer, text, at, left)
        joined.add(ids[first:last], starts[first:last], ends[first:last])
        joined.add_text(tokenizer, text, right, low)
        if high > len(text):
            break
        begin = joined.count
        joined.add_text(tokenizer, text, low, high)
        tokens.append((begin, joined.count))
        at = high
    return joined.encoding(), tuple(tokens)


def placed(
    parts: Sequence[Excerpt], tokens: Ranges, starts: IntArray, places: Ranges
) -> tuple[Excerpt, ...]:
    """The parts with their ranges of tokens, and where each token begins in its own text."""
    return tuple(
        replace(part, start=low, stop=high, characters=starts[low:high] - place)
        for part, (low, high), (place, _) in zip(parts, tokens, places, strict=True)
    )


class _Joined:
    """Tokens of a text, put together from pieces of it."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[IntArray, IntArray, IntArray]] = []

    def add(self, ids: IntArray, starts: IntArray, ends: IntArray) -> None:
        self._parts.append((ids, starts, ends))
        self.count += len(ids)

    def add_text(self, tokenizer: Any, text: str, low: int, high: int) -> None:
        if low < high:
            encoding = encode_alone(tokenizer, text[low:high])
            starts, ends = token_edges(encoding)
            self.add(np.array(encoding.ids, dtype=np.int64), starts + low, ends + low)

    def encoding(self) -> TokenOffsets:
        ids, starts, ends = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        return TokenOffsets(ids.tolist(), starts, ends)
