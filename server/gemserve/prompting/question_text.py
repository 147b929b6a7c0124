"""Finds the question in a message or a plain prompt: rules about characters, not about tokens.

A short text is a question as a whole. A longer one is a document with a question at one of its
ends, and these rules find it:

1. After a label: the text after the last "Question:", up to an "Answer:", if it is short.
2. At the end: the last paragraph. Paragraphs of a word or two ("Answer:", "Thanks!") and closed
   blocks of code after it are skipped. If it has no question mark, an earlier paragraph that ends
   in a question mark belongs to it, with all between them, if these are short. If it asks nothing,
   the paragraph before it belongs to it. If it has several lines, the last lines that end in
   question marks are the question, with all lines after them.
3. At the end of a paragraph that is a document itself: its last question or request, else its
   last sentences, as many as are short together.
4. In front: between the labels "Question:" and "Context:", else the first paragraph or its first
   line, after a greeting, if it is short and asks. With "Answer:" as its end, behind these labels,
   the text has no other question.
5. Between two documents: the only short paragraph that ends in a question mark.

The end is preferred unless only the front asks, and both to what stands between documents. A text
that ends in a question mark surely asks. A text that begins with a question word or an imperative
may be asking; so may a document. The rules know these words in English only, but question marks of
other scripts as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.prompting.code_blocks import closed_blocks
from gemserve.prompting.protected import LONGEST_QUESTION
from gemserve.prompting.question_words import (
    ANSWER_LABEL,
    ASKING_PARAGRAPH,
    BLANK_LINE,
    COLON_AT_END,
    CONTEXT_LABEL,
    IMPERATIVE,
    LABEL,
    LINE_END,
    MARK,
    MARK_AT_END,
    QUESTION_WORD,
    TAIL,
    UNSPACED,
    WISH,
    Range,
    find_sentences,
    split,
    stripped,
)

CountTokens = Callable[[int, int], int]  # of a range of characters

_PIECE = 1 << 15  # characters; a pattern holds the interpreter lock until it finds something
_LONGEST_BETWEEN = 1024  # characters of a question between two documents
_END_CHARS = 4096  # the rules look at so many characters at either end of the text
_MOST_PARAGRAPHS = 8
_TAIL_CHARS = 80
_TINY_CHARS = 12
_TINY_WORDS, _TINY_WORDS_CHARS = 2, 24


class _Asks(IntEnum):
    NO = 0
    MAYBE = 1
    SURELY = 2


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Ranges that may be the question, the most important first."""

    ranges: list[Range]
    asks: _Asks


def find_question(text: str, count_tokens: CountTokens, *, is_plain: bool = False) -> list[Range]:
    """The ranges of `text` that ask, the most important first; they may overlap.

    They may have more than `MAX_QUESTION_TOKENS` tokens; the end of each range matters most.
    `is_plain`: the model goes on after a tail such as "Answer:", which is no part of the question.
    """
    whole = stripped(text, 0, len(text))
    untailed = _without_tail(text, whole)
    has_tail = untailed != whole
    if is_plain:
        whole = untailed
    if whole[0] == whole[1]:
        return []
    finder = _Finder(text, whole, count_tokens)
    if finder.is_short(whole):
        labelled = finder.labelled() if is_plain else None
        return [whole] if labelled is None else labelled.ranges
    labelled_in_front = finder.before_context()
    if labelled_in_front is not None and has_tail:
        return [labelled_in_front]
    after = finder.at_end()
    if after.asks is _Asks.SURELY:
        front = None
    elif labelled_in_front is not None:
        front = _Candidate([labelled_in_front], _Asks.SURELY)
    else:
        front = finder.in_front()
    if not after.asks and (front is None or not front.asks):
        between = finder.between_documents()
        if between is not None:
            return [between]
    if front is None:
        return after.ranges
    if front.asks is _Asks.NO:  # it only ends in a colon, as in "Read this:"
        return after.ranges if after.asks else [after.ranges[0], *front.ranges]
    return [*front.ranges, *after.ranges] if after.asks else front.ranges


@dataclass(frozen=True, slots=True)
class _Finder:
    text: str
    whole: Range
    count_tokens: CountTokens

    def labelled(self) -> _Candidate | None:
        """The text after the last "Question:", up to an answer, if it is short enough."""
        start, end = _without_tail(self.text, self.whole)
        start = max(start, end - _END_CHARS)
        labels = list(LABEL.finditer(self.text[start:end]))
        if not labels:
            return None
        question = stripped(self.text, start + labels[-1].end(), end)
        if self.count_tokens(*question) > LONGEST_QUESTION:
            return None
        # the client has begun the answer, or the document contains it
        answer = ANSWER_LABEL.search(self.at(question))
        if answer:
            question = stripped(self.text, question[0], question[0] + answer.start())
        if question[0] == question[1]:
            return None
        return _Candidate(self._parts(question), _Asks.MAYBE if answer else _Asks.SURELY)

    def at_end(self) -> _Candidate:
        """The question at the end of the text, else its last words."""
        labelled = self.labelled()
        if labelled is not None:
            return labelled
        paragraphs = self._last_paragraphs()
        skipped = list(takewhile(lambda place: is_tiny(self.at(place)), paragraphs))
        if len(skipped) == len(paragraphs):
            return _Candidate(skipped, _Asks.NO)
        last, *others = paragraphs[len(skipped) :]
        code_end = max((high for _, high in closed_blocks(self.text)), default=0)
        # a caption of code is no part of the question
        skipped = [place for place in skipped if place[0] >= code_end]
        if self.count_tokens(*last) > LONGEST_QUESTION:
            found = self._end_of_document(last)
            if found.asks:
                return _Candidate([*found.ranges, *skipped], found.asks)
            return _Candidate([*skipped, *found.ranges], found.asks)
        lines = self._last_lines(last)
        if lines is not None:
            return _Candidate([*lines.ranges, *skipped], lines.asks)
        asks = asks_of(self.at(last))
        before = self._before(last, others)
        if before and not asks:
            asks = min(_Asks.MAYBE, asks_of(self.at(before[-1])))
        question = [last, *skipped, *before]
        if sum(self.count_tokens(*place) for place in question) > MAX_QUESTION_TOKENS:
            question = [part for place in question for part in self._parts(place)]
        return _Candidate(question, asks)

    def in_front(self) -> _Candidate | None:
        """The first paragraph or its first line, after a greeting, if it is short and asks."""
        start, end = self.whole[0], min(self.whole[0] + _END_CHARS, self.whole[1])
        end = min([end, *(start + low for low, _ in closed_blocks(self.text[start:end]))])
        for paragraph in split(BLANK_LINE, self.text, start, end)[:3]:
            line = split(LINE_END, self.text, *paragraph)[0]
            part = self.at(paragraph)
            is_one = MARK_AT_END.search(part) or COLON_AT_END.search(part)
            for place in (paragraph, line) if is_one else (line,):
                part = self.at(place)
                asks = asks_of(part)
                is_asking = bool(asks or COLON_AT_END.search(part)) and not is_tiny(part)
                if is_asking and self.is_short(place):
                    return _Candidate([place], asks)
            if not is_tiny(self.at(paragraph)):
                break
        return None

    def before_context(self) -> Range | None:
        """The text from "Question:" to the label of what is to be read, if both are in front."""
        start = self.whole[0]
        head = self.text[start : min(start + _END_CHARS, self.whole[1])]
        label = LABEL.search(head)
        context = CONTEXT_LABEL.search(head, label.end()) if label else None
        if label is None or context is None:
            return None
        # else it is of the documents, or of an example
        is_in_front = not CONTEXT_LABEL.search(head, 0, label.start())
        tail = self.text[max(start + context.end(), self.whole[1] - _END_CHARS) : self.whole[1]]
        if not is_in_front or LABEL.search(tail) or LABEL.search(head, context.end()):
            return None
        place = stripped(self.text, start + label.end(), start + context.start())
        if ANSWER_LABEL.search(self.at(place)):
            return None
        return place if place[0] < place[1] and self.is_short(place) else None

    def between_documents(self) -> Range | None:
        """The only short paragraph that ends in a question mark."""
        found: list[Range] = []
        low, high = self.whole
        for start in range(low, high, _PIECE):
            for mark in ASKING_PARAGRAPH.finditer(self.text, start, min(high, start + 2 * _PIECE)):
                if mark.start() >= start + _PIECE:
                    break
                before = max(low, mark.end() - _LONGEST_BETWEEN)
                place = split(BLANK_LINE, self.text, before, mark.end())[-1]
                if place[0] == before > low or is_tiny(self.at(place)) or not self.is_short(place):
                    continue
                found.append(place)
                if len(found) > 1:
                    return None
        return found[0] if found else None

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
            prose = max(high, end - _END_CHARS), end
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

    def _last_lines(self, paragraph: Range) -> _Candidate | None:
        """The lines from the last one that asks to the end of the paragraph, if they are short."""
        lines = split(LINE_END, self.text, *paragraph)
        short = [line for line in lines[1:] if self.is_short((line[0], paragraph[1]))]
        for line in reversed(short):
            goes_on = self.text[paragraph[0] : line[0]].rstrip()[-1:] not in tuple(".!?:;")
            is_wrapped = goes_on and self.text[line[0]].islower()
            if MARK_AT_END.search(self.at(line)) and not is_wrapped:
                asks = _Asks.SURELY if line == lines[-1] else _Asks.MAYBE
                earlier = reversed(short[: short.index(line)])
                question = [line, *takewhile(lambda p: MARK_AT_END.search(self.at(p)), earlier)]
                return _Candidate([(question[-1][0], paragraph[1])], asks)
        if short and not self.is_short(paragraph) and asks_of(self.at(lines[-1])):
            return _Candidate([lines[-1]], _Asks.MAYBE)
        return None

    def _end_of_document(self, paragraph: Range) -> _Candidate:
        """See rule 3 of the module's docstring."""
        low, high = paragraph
        lines = self._last_lines(paragraph)
        if lines is not None:
            return lines
        sentences = find_sentences(self.text, max(low, high - _END_CHARS), high)
        short = [s for s in sentences if self.is_short((s[0], high))]
        if not short:
            return _Candidate(sentences[-1:], asks_of(self.at(sentences[-1])))
        found = max(short, key=lambda s: (asks_of(self.at(s)), s))
        asks = asks_of(self.at(found))
        return _Candidate([(found[0] if asks else short[0][0], high)], asks)

    def _parts(self, place: Range) -> list[Range]:
        """The sentences of a long question that end in a question mark, then all of it."""
        if self.is_short(place):
            return [place]
        sentences = reversed(find_sentences(self.text, *place))
        return [*(s for s in sentences if MARK_AT_END.search(self.at(s))), place]


def asks_of(text: str) -> _Asks:
    """See the module's docstring."""
    text = text.strip()
    if MARK_AT_END.search(text):
        return _Asks.SURELY
    is_open = bool(QUESTION_WORD.match(text)) and not text.endswith((".", "!", ":", ";", ","))
    if is_open or MARK.search(text) or IMPERATIVE.match(text) or WISH.search(text):
        return _Asks.MAYBE
    return _Asks.NO


def is_tiny(text: str) -> bool:
    """Is the text only a word or two, such as "Answer:", and neither question nor request?"""
    text = text.strip()
    # where words are not separated a character says about as much as half a word
    unspaced = sum(len(run) for run in UNSPACED.findall(text))
    words, size = len(text.split()) + unspaced // 2, len(text) + 2 * unspaced
    is_request = IMPERATIVE.match(text) and words > 1 and not COLON_AT_END.search(text)
    if MARK_AT_END.search(text) or is_request:
        return False
    return size < _TINY_CHARS or (words <= _TINY_WORDS and size < _TINY_WORDS_CHARS)


def _without_tail(text: str, whole: Range) -> Range:
    """`whole` without an "Answer:" at its end, unless nothing else is left."""
    low, high = whole
    at = max(low, high - _TAIL_CHARS)
    tail = TAIL.search(text[at:high])
    shorter = stripped(text, low, at + tail.start()) if tail else whole
    return shorter if shorter[0] < shorter[1] else whole
