"""Finds what a sequence's text has behind its newest tokens, where they stand in it already."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import numpy as np

# How often the text is right depends on how many of the newest tokens stand at the place: so many
# at most, or more. What is taken for that before it was seen counts as much as a few proposals.
_COMMON = (2, 4, 8)
_FIRST_RATES, _FIRST_WEIGHT = (0.6, 0.7, 0.85, 0.95), 8
_MOST_COMMON = 16
_FORGETTING = 0.9  # of how often the text was right, by proposal


class TextIndex:
    """The text of one sequence, and how often it told what came next.

    The text is what the answer is generated from, and the answer. It is searched anew in each step:
    that takes microseconds, and a table of what stands where would take a hundred times its memory.
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)  # with room behind the text
        self._length = self._num_generated = 0
        # by how many tokens are common, that of `found` being the `_kind`-th
        self._hits = [max(0.0, rate * _FIRST_WEIGHT - 1) for rate in _FIRST_RATES]
        self._misses = [max(0.0, (1 - rate) * _FIRST_WEIGHT - 1) for rate in _FIRST_RATES]
        self._kind = 0
        self.found: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """How likely a token that was found is to be drawn, by what was drawn so far."""
        hits, misses = self._hits[self._kind], self._misses[self._kind]
        return (hits + 1) / (hits + misses + 2)

    def look(
        self, ids: Sequence[int], generated: Sequence[int], most: int, end_ids: Collection[int]
    ) -> None:
        """Note in `found` what the text has behind its newest tokens: at most `most` tokens.

        `ids`, `generated`: the text, of which only what is new is read. Tokens of `end_ids` are
        never found, and nothing behind them.
        """
        if not self._length:
            self._append(ids)
        self._append(generated[self._num_generated :])
        self._num_generated = len(generated)
        text = self._ids[: self._length]
        place = _find_again(text)
        following: list[int] = []
        if place is not None:
            at, common = place
            following = text[at : at + most].tolist()
            self._kind = bisect_left(_COMMON, common)
        ends = (index for index, token in enumerate(following) if token in end_ids)
        self.found = tuple(following[: next(ends, most)])

    def learn(self, drawn: Sequence[int], num_proposed: int) -> None:
        """Compare what was found with the tokens that came, of which the first counts anyway."""
        checked, self.found = self.found[: max(1, num_proposed)], ()
        if not checked:
            return
        pairs = zip(checked, drawn, strict=False)
        hits = next((i for i, (found, token) in enumerate(pairs) if found != token), None)
        self._hits[self._kind] *= _FORGETTING
        self._misses[self._kind] *= _FORGETTING
        self._hits[self._kind] += min(len(checked), len(drawn)) if hits is None else hits
        self._misses[self._kind] += hits is not None

    def _append(self, tokens: Sequence[int]) -> None:
        stop = self._length + len(tokens)
        if stop > len(self._ids):
            self._ids = np.resize(self._ids, stop + stop // 4 + 64)
        self._ids[self._length : stop] = tokens
        self._length = stop


def _find_again(text: np.ndarray) -> tuple[int, int] | None:
    """Where most of the text's last tokens stand before, at least two: behind them, and how many.

    Of several such places it is the last.
    """
    places = np.flatnonzero((text[:-2] == text[-2:-1]) & (text[1:-1] == text[-1:])) + 2
    if not len(places):
        return None
    common = 2
    while common < min(_MOST_COMMON, len(text) - 1):
        longer = places[places > common]
        longer = longer[text[longer - common - 1] == text[-common - 1]]
        if not len(longer):
            break
        places, common = longer, common + 1
    return int(places[-1]), common
