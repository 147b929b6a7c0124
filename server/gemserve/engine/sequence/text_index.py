"""Finds what a sequence's text has behind its newest tokens, where they stand in it already."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

_FORGETTING = 0.9  # of how often the text was right, by proposal


class TextIndex:
    """The text of one sequence, and how often it told what came next.

    The text is what the answer is generated from, and the answer. It is searched anew in each step:
    that takes microseconds, and a table of what stands where would take a hundred times its memory.
    """

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)  # with room behind the text
        self._length = self._num_generated = 0
        self._hits = self._misses = 0.0
        self.found: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """How likely a token is to be drawn if the text has it next, by what was drawn so far."""
        return (self._hits + 1) / (self._hits + self._misses + 2)

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
        at = _find_again(text)
        following: list[int] = [] if at is None else text[at : at + most].tolist()
        ends = (index for index, token in enumerate(following) if token in end_ids)
        self.found = tuple(following[: next(ends, most)])

    def learn(self, drawn: Sequence[int], num_proposed: int) -> None:
        """Compare what was found with the tokens that came, of which the first counts anyway."""
        checked, self.found = self.found[: max(1, num_proposed)], ()
        if not checked:
            return
        pairs = zip(checked, drawn, strict=False)
        hits = next((i for i, (found, token) in enumerate(pairs) if found != token), None)
        self._hits *= _FORGETTING
        self._misses *= _FORGETTING
        self._hits += min(len(checked), len(drawn)) if hits is None else hits
        self._misses += hits is not None

    def _append(self, tokens: Sequence[int]) -> None:
        stop = self._length + len(tokens)
        if stop > len(self._ids):
            self._ids = np.resize(self._ids, stop + stop // 4 + 64)
        self._ids[self._length : stop] = tokens
        self._length = stop


def _find_again(text: np.ndarray) -> int | None:
    """What follows the last place where the text's last three tokens, or two, stand before."""
    pairs = np.flatnonzero((text[:-2] == text[-2:-1]) & (text[1:-1] == text[-1:])) + 2
    threes = pairs[(pairs > 2) & (text[pairs - 3] == text[-3:][:1])] if len(text) > 2 else pairs
    places = threes if len(threes) else pairs
    return int(places[-1]) if len(places) else None
