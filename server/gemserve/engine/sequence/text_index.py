"""Finds what a sequence's text has behind its newest tokens, where they stand in it already."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ids

NGRAMS = (3, 2)  # how many tokens have to stand in the text already; the most first
_FORGETTING = 0.9  # of how often the text was right, by proposal


class TextIndex:
    """Where each n-gram of one sequence's text was last, and how often that told what came next.

    The text is what the answer is generated from, and the answer.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the n-gram's next token is
        self._num_generated = 0
        self._hits = self._misses = 0.0
        self.found: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """How likely a token is to be drawn if the text has it next, by what was drawn so far."""
        return (self._hits + 1) / (self._hits + self._misses + 2)

    def look(self, ids: Ids[int], generated: Ids[int], most: int, end_ids: Collection[int]) -> None:
        """Note in `found` what the text has behind its newest tokens: at most `most` tokens.

        `ids`, `generated`: the text, of which only what is new is read. Tokens of `end_ids` are
        never found, and nothing behind them.
        """
        if not self._ids:
            self._append(ids)
        self._append(generated[self._num_generated :])
        self._num_generated = len(generated)
        ends_of_text = (tuple(self._ids[-size:]) for size in NGRAMS)
        at = next((self._after[ngram] for ngram in ends_of_text if ngram in self._after), None)
        following = [] if at is None else self._ids[at : at + most]
        ends = (index for index, token in enumerate(following) if token in end_ids)
        self.found = tuple(following[: next(ends, most)])

    def learn(self, drawn: Ids[int], num_proposed: int) -> None:
        """Compare what was found with the tokens that came, of which the first counts anyway."""
        checked = self.found[: max(1, num_proposed)]
        if not checked:
            return
        pairs = zip(checked, drawn, strict=False)
        hits = next((i for i, (found, token) in enumerate(pairs) if found != token), None)
        self._hits *= _FORGETTING
        self._misses *= _FORGETTING
        self._hits += min(len(checked), len(drawn)) if hits is None else hits
        self._misses += hits is not None

    def _append(self, tokens: Ids[int]) -> None:
        ids, after = self._ids, self._after
        for token in tokens:
            for size in NGRAMS:
                if len(ids) >= size:
                    after[tuple(ids[-size:])] = len(ids)
            ids.append(token)
