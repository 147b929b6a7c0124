"""Finds the question in a message or a plain prompt: rules about characters, not about tokens.

A short text is a question as a whole. A longer one is a document with a question at one of its
ends, and these rules find it:

1. After a label: what follows the last "Question:", up to an "Answer:", if it is short.
2. At the end: the last paragraph, past paragraphs of a word or two ("Answer:", "Thanks!") and past
   closed blocks of code. If it has no question mark, it belongs to one before it that ends in a
   question mark, with all between them, if these are short; if it asks nothing itself, the one
   before belongs to it. Of several lines, those from the last ones that end in question marks.
3. At the end of a paragraph that is a document itself: its last question or request, or else as
   many of its last sentences as are short.
4. In front: the first paragraph or its first line, past a greeting, if it is short and asks.

The end is preferred unless only the front asks. A text surely asks if it ends in a question mark.
It may be asking if it begins with a question word or an imperative: documents do so too. These
words are known in English only, question marks in other scripts as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

from gemserve.prompting.code_blocks import closed_blocks
from gemserve.prompting.protected import LONGEST_QUESTION
from gemserve.prompting.question_words import (
    ANSWER_LABEL,
    BLANK_LINE,
    COLON_AT_END,
    IMPERATIVE,
    LABEL,
    LINE_END,
    MARK,
    MARK_AT_END,
    QUESTION_WORD,
    TAIL,
    WISH,
    Range,
    find_sentences,
    split,
    stripped,
)
from gemserve.types import MAX_QUESTION_TOKENS

CountTokens = Callable[[int, int], int]  # of a range of characters

_WINDOW = 4096  # characters at an end of the text that are looked at
_MOST_PARAGRAPHS = 8
_TAIL_CHARS = 80
_TINY_CHARS = 12
_TINY_WORDS, _TINY_WORDS_CHARS = 2, 24


class _Asks(IntEnum):
    NO = 0
    MAYBE = 1
    SURELY = 2


@dataclass(frozen=True, slots=True)
class _Found:
    """Ranges of a question, the most important first."""

    ranges: list[Range]
    asks: _Asks


def find_question(text: str, count_tokens: CountTokens, *, is_plain: bool = False) -> list[Range]:
    """The ranges of `text` that ask, the most important first; they may overlap.

    They can come to more tokens than `MAX_QUESTION_TOKENS`: of each range its end matters most.
    `is_plain`: a tail such as "Answer:" is where the model goes on, and not part of the question.
    """
    whole = stripped(text, 0, len(text))
    if is_plain:
        whole = _without_tail(text, whole)
    if whole[0] == whole[1]:
        return []
    finder = _Finder(text, whole, count_tokens)
    if finder.is_short(whole):
        labelled = finder.labelled() if is_plain else None
        return [whole] if labelled is None else labelled.ranges
    after = finder.at_end()
    front = None if after.asks is _Asks.SURELY else finder.in_front()
    if front is None:
        return after.ranges
    if front.asks is _Asks.NO:  # no more than a colon, as in "Read this:"
        return after.ranges if after.asks else [after.ranges[0], *front.ranges]
    return [*front.ranges, *after.ranges] if after.asks else front.ranges


@dataclass(frozen=True, slots=True)
class _Finder:
    text: str
    whole: Range
    count_tokens: CountTokens

    def labelled(self) -> _Found | None:
        """What follows the last "Question:", up to an answer, if it is short enough."""
        start, end = _without_tail(self.text, self.whole)
        start = max(start, end - _WINDOW)
        labels = list(LABEL.finditer(self.text[start:end]))
        if not labels:
            return None
        asked = stripped(self.text, start + labels[-1].end(), end)
        if self.count_tokens(*asked) > LONGEST_QUESTION:
            return None
        answer = ANSWER_LABEL.search(self.at(asked))  # it is begun, or a document's own
        if answer:
            asked = stripped(self.text, asked[0], asked[0] + answer.start())
        if asked[0] == asked[1]:
            return None
        return _Found(self._parts(asked), _Asks.MAYBE if answer else _Asks.SURELY)

    def at_end(self) -> _Found:
        """What the text's end asks, or else what it ends in."""
        labelled = self.labelled()
        if labelled is not None:
            return labelled
        paragraphs = self._last_paragraphs()
        passed = list(takewhile(lambda place: is_tiny(self.at(place)), paragraphs))
        if len(passed) == len(paragraphs):
            return _Found(passed, _Asks.NO)
        last, *others = paragraphs[len(passed) :]
        code_end = max((high for _, high in closed_blocks(self.text)), default=0)
        passed = [place for place in passed if place[0] >= code_end]  # no captions of code
        if self.count_tokens(*last) > LONGEST_QUESTION:
            found = self._end_of_document(last)
            if found.asks:
                return _Found([*found.ranges, *passed], found.asks)
            return _Found([*passed, *found.ranges], found.asks)
        lines = self._last_lines(last)
        if lines is not None:
            return _Found([*lines.ranges, *passed], lines.asks)
        asks = asks_of(self.at(last))
        before = self._before(last, others)
        if before and not asks:
            asks = min(_Asks.MAYBE, asks_of(self.at(before[-1])))
        asked = [last, *passed, *before]
        if sum(self.count_tokens(*place) for place in asked) > MAX_QUESTION_TOKENS:
            asked = [part for place in asked for part in self._parts(place)]
        return _Found(asked, asks)

    def in_front(self) -> _Found | None:
        """The first paragraph or its first line, past a greeting, if it is short and asks."""
        start, end = self.whole[0], min(self.whole[0] + _WINDOW, self.whole[1])
        end = min([end, *(start + low for low, _ in closed_blocks(self.text[start:end]))])
        for paragraph in split(BLANK_LINE, self.text, start, end)[:3]:
            line = split(LINE_END, self.text, *paragraph)[0]
            said = self.at(paragraph)
            is_one = MARK_AT_END.search(said) or COLON_AT_END.search(said)
            for place in (paragraph, line) if is_one else (line,):
                said = self.at(place)
                asks = asks_of(said)
                is_asking = bool(asks or COLON_AT_END.search(said)) and not is_tiny(said)
                if is_asking and self.is_short(place):
                    return _Found([place], asks)
            if not is_tiny(self.at(paragraph)):
                break
        return None

    def at(self, place: Range) -> str:
        return self.text[place[0] : place[1]]

    def is_short(self, place: Range) -> bool:
        return self.count_tokens(*place) <= MAX_QUESTION_TOKENS

    def _last_paragraphs(self) -> list[Range]:
        """The last paragraphs that are not code, the last one first."""
        start, end = self.whole
        found: list[Range] = []
        blocks = [(low, high) for low, high in closed_blocks(self.text) if start <= low < end]
        for low, high in [*reversed(blocks), (start, start)]:
            prose = max(high, end - _WINDOW), end
            if prose[0] < prose[1]:
                found += reversed(split(BLANK_LINE, self.text, *prose))
            if len(found) >= _MOST_PARAGRAPHS or prose[0] > high:
                break
            end = low
        return found[:_MOST_PARAGRAPHS] or [self.whole]

    def _before(self, last: Range, others: list[Range]) -> list[Range]:
        """The paragraphs before the last one that make one question with it."""
        if MARK.search(self.at(last)):
            return []
        total = self.count_tokens(*last)
        for index, place in enumerate(others):
            total += self.count_tokens(*place)
            limit = LONGEST_QUESTION if index == 0 else MAX_QUESTION_TOKENS
            if MARK_AT_END.search(self.at(place)) and total <= limit:
                return others[: index + 1]
            if total > MAX_QUESTION_TOKENS:
                break
        both = sum(self.count_tokens(*place) for place in (last, *others[:1]))
        is_part = not asks_of(self.at(last)) and both <= MAX_QUESTION_TOKENS
        return others[:1] if is_part else []

    def _last_lines(self, paragraph: Range) -> _Found | None:
        """Of several lines, those from the last one that asks, if they are short."""
        lines = split(LINE_END, self.text, *paragraph)
        short = [line for line in lines[1:] if self.is_short((line[0], paragraph[1]))]
        for line in reversed(short):
            goes_on = self.text[paragraph[0] : line[0]].rstrip()[-1:] not in tuple(".!?:;")
            is_wrapped = goes_on and self.text[line[0]].islower()
            if MARK_AT_END.search(self.at(line)) and not is_wrapped:
                asks = _Asks.SURELY if line == lines[-1] else _Asks.MAYBE
                earlier = reversed(short[: short.index(line)])
                asked = [line, *takewhile(lambda p: MARK_AT_END.search(self.at(p)), earlier)]
                return _Found([(asked[-1][0], paragraph[1])], asks)
        if short and not self.is_short(paragraph) and asks_of(self.at(lines[-1])):
            return _Found([lines[-1]], _Asks.MAYBE)
        return None

    def _end_of_document(self, paragraph: Range) -> _Found:
        """See rule 3 of the module's docstring."""
        low, high = paragraph
        lines = self._last_lines(paragraph)
        if lines is not None:
            return lines
        sentences = find_sentences(self.text, max(low, high - _WINDOW), high)
        short = [s for s in sentences if self.is_short((s[0], high))]
        if not short:
            return _Found(sentences[-1:], asks_of(self.at(sentences[-1])))
        found = max(short, key=lambda s: (asks_of(self.at(s)), s))
        asks = asks_of(self.at(found))
        return _Found([(found[0] if asks else short[0][0], high)], asks)

    def _parts(self, place: Range) -> list[Range]:
        """Of a long question: its sentences that end in a question mark, then all of it."""
        if self.is_short(place):
            return [place]
        sentences = reversed(find_sentences(self.text, *place))
        return [*(s for s in sentences if MARK_AT_END.search(self.at(s))), place]


def asks_of(text: str) -> _Asks:
    """See the module's docstring."""
    said = text.strip()
    if MARK_AT_END.search(said):
        return _Asks.SURELY
    is_open = bool(QUESTION_WORD.match(said)) and not said.endswith((".", "!", ":", ";", ","))
    if is_open or MARK.search(said) or IMPERATIVE.match(said) or WISH.search(said):
        return _Asks.MAYBE
    return _Asks.NO


def is_tiny(text: str) -> bool:
    """Is it no more than a word or two such as "Answer:"? A question or a request never is."""
    said = text.strip()
    words = len(said.split())
    is_request = IMPERATIVE.match(said) and words > 1 and not COLON_AT_END.search(said)
    if MARK_AT_END.search(said) or is_request:
        return False
    return len(said) < _TINY_CHARS or (words <= _TINY_WORDS and len(said) < _TINY_WORDS_CHARS)


def _without_tail(text: str, whole: Range) -> Range:
    """`whole` without an "Answer:" at its end, if that is not all of it."""
    low, high = whole
    at = max(low, high - _TAIL_CHARS)
    tail = TAIL.search(text[at:high])
    shorter = stripped(text, low, at + tail.start()) if tail else whole
    return shorter if shorter[0] < shorter[1] else whole
