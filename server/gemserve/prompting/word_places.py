"""Finds where the words of a question occur in its prompt.

They are found as they stand, in any case. Nothing is known of any language: how much a word says
follows from how many passages have it (`filtering.word_ranks`). Scripts that put no spaces between
words are searched by pairs of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from gemserve.contract.prompt_parts import TokenArray
from gemserve.prompting.encoding import IntArray
from gemserve.prompting.question_words import UNSPACED
from gemserve.ranges import Ranges

# accents behind their letter that SQLite's full-text index takes for parts of words
_ACCENTS = r"[\u0300-\u0304\u0306-\u030c\u030f\u0311\u031b\u0323-\u0328\u032d\u032e\u0330\u0331]"
_WORD = re.compile(rf"[^\W_]+(?:{_ACCENTS}[^\W_]*)*")
_PIECE = 1 << 15  # characters; a pattern holds the interpreter lock until it finds something


def find_word_places(text: str, starts: IntArray, question: Ranges) -> tuple[TokenArray, ...]:
    """For each word of the question the tokens that it begins in, ascending. [places] each.

    `starts`: the character at which each token begins, ascending. Words that occur nowhere else
    are there, too: with the places in the question.
    """
    edges = np.append(starts, len(text))
    asked = [text[edges[first] : edges[stop]] for first, stop in question]
    words, pairs = find_terms(asked)
    found: dict[str, list[int]] = {}
    patterns = []
    if words:
        patterns.append(
            rf"(?<![^\W_])(?<!{_ACCENTS})({'|'.join(map(re.escape, words))})"
            rf"(?![^\W_])(?!{_ACCENTS})"
        )
    if pairs:
        patterns.append(f"(?=({'|'.join(map(re.escape, pairs))}))")
    for pattern in patterns:
        for word, at in _occurrences(re.compile(pattern, re.IGNORECASE), text):
            found.setdefault(word, []).append(at)
    characters = (np.array(at, dtype=np.int64) for at in found.values())
    return tuple(starts.searchsorted(at, side="right") - 1 for at in characters)


def find_terms(asked: list[str]) -> tuple[list[str], list[str]]:
    """The distinct words of texts, and pairs of characters where words are not separated."""
    words: dict[str, None] = {}
    pairs: dict[str, None] = {}
    for text in asked:
        for unspaced in UNSPACED.finditer(text):
            run = unspaced[0]
            found = [run] if len(run) == 1 else map("".join, pairwise(run))
            pairs |= dict.fromkeys(found)
        for word in _WORD.finditer(UNSPACED.sub(" ", text)):
            words[_folded(word[0])] = None
    return list(words), list(pairs)


def _occurrences(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, int]]:
    """Each occurrence: the word, and its first character's place."""
    for start in range(0, len(text), _PIECE):
        stop = start + _PIECE
        # `endpos` would hide what follows a word at the piece's end
        for match in pattern.finditer(text, start, min(len(text), stop + _PIECE)):
            if match.start() >= stop:
                break
            yield _folded(match[1]), match.start()


def _folded(word: str) -> str:
    """The word without its case, of as many characters: a pattern takes "ß" for one, not for two.

    Each character is folded alone, because lower case of a Greek word depends on where it ends.
    """
    folded = word.casefold()
    if len(folded) == len(word):
        return folded
    cases = ((c, (c.casefold(), c.lower())) for c in word)
    return "".join(next((each for each in given if len(each) == 1), c) for c, given in cases)
