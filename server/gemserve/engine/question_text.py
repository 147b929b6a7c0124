"""Finds the question in a message or a plain prompt: rules about characters, not about tokens.

A text that is not a question as a whole is a document with a question at one of its ends. The
rules, in order:

1. A label ("Question:") in the last lines: what follows it, if no answer follows.
2. The last paragraph, passing over paragraphs of a word or two ("Answer:", "Thanks!") and over
   closed blocks of code. If it has no question mark, the paragraph before belongs to it where that
   ends in one; if it asks nothing at all, the one before belongs to it where both are short.
3. Of a last paragraph that is a document itself: its last line, or else its last sentence, where
   that asks; or else as many of its last sentences as are short.
4. The first paragraph, or the first line, if it asks and nothing at the end does.

A text asks if it ends in a question mark, or begins with a question word or an imperative. Only
English words are known; question marks of other scripts are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gemserve.engine.code_blocks import closed_blocks
from gemserve.filtering.spans import LONGEST_QUESTION
from gemserve.types import MAX_QUESTION_TOKENS

Range = tuple[int, int]  # of characters, half-open
CountTokens = Callable[[int, int], int]  # of a range of characters

_WINDOW = 4096  # characters at an end of the text that are looked at
_MOST_PARAGRAPHS = 8
_TAIL_CHARS = 80
_TINY_CHARS = 12
_TINY_WORDS = 2
LINE_END = r"(?>\r\n|[\n\r\x0b\x0c\x85\u2028\u2029])"
BLANK_LINE = re.compile(rf"{LINE_END}[^\S\r\n]*{LINE_END}")
_LINE_END = re.compile(LINE_END)
_MARK = re.compile(r"[?？؟⁇][\"'”’»)\]*_]*(?=\s|$)|[？؟]")
_MARK_AT_END = re.compile(r"[?？؟⁇][\"'”’»)\]*_!.]*$")
_ENDS_ASKING = re.compile(_MARK_AT_END.pattern + "|[:：]$")
_WORDS_BEFORE = r"\W*(?:(?:and|so|now|then|also|next|finally|first|but|ok|okay|well)\b\W*)*"
_IMPERATIVE = re.compile(
    _WORDS_BEFORE
    + r"(?:please|kindly|summari[sz]e|find|list|answer|explain|describe|tell|give|show|"
    r"write|translate|name|identify|extract|compare|classify|count|provide|quote|rewrite|repeat|"
    r"complete|continue|fix|review|return|determine|locate|look|report|compute|calculate|choose|"
    r"select|say|state|outline|discuss|create|generate|analy[sz]e|help|check|make|solve|print|"
    r"(?:i|we) (?:want|need|would like|wish)|i'd like|let me know|"
    r"(?:using|based on|according to|given|from|in) (?:the|this|that|these|what))\b",
    re.IGNORECASE,
)
_QUESTION_WORD = re.compile(
    _WORDS_BEFORE + r"(?:who|whom|whose|what|which|when|where|why|how|is|are|was|were|do|does|did|"
    r"can|could|would|will|should|has|have|had)\b",
    re.IGNORECASE,
)
_WISH = re.compile(r"\b(?:please|tell me|let me know|(?:can|could) you)\b", re.IGNORECASE)
_LABEL = re.compile(
    r"(?:^|(?<=[\n\r])|(?<=[.!?] ))[ \t#*]*(?:question|query|q)[ \t]*\d*[*]*[:：][*]*\s*",
    re.IGNORECASE,
)
_ANSWER_LABEL = re.compile(r"(?:^|\s)[#*]*(?:answer|a)[ \t]*\d*[*]*[:：]", re.IGNORECASE)
_TAIL = re.compile(
    r"(?:^|\s)[#*]*(?:(?:the|your|final|short|correct|best)[ \t]+){0,2}"
    r"(?:answer|a|response|reply|assistant|ai|bot|model|output|result|solution|summary|completion)"
    r"(?:[ \t]+is)?[ \t]*[*]*[:：][*]*\s*$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’»)\]*_]*\s+|[。！？]|[\n\r]\s*)")
_NO_SENTENCE_END = re.compile(
    r"(?:\b(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|Sr|Jr|No|Fig|Sec|vs|cf|e\.g|i\.e|approx|ca|etc))\.\s*$"
)


@dataclass(frozen=True, slots=True)
class _Found:
    """Ranges at the end of a text, the most important first."""

    ranges: list[Range] = field(default_factory=list)
    is_sure: bool = False


def find_question(text: str, count_tokens: CountTokens, *, is_plain: bool = False) -> list[Range]:
    """The ranges of `text` that ask, the most important first; they may overlap.

    They can come to more tokens than `MAX_QUESTION_TOKENS`: of each range its end matters most.
    `is_plain`: a tail such as "Answer:" is where the model goes on, and not part of the question.
    """
    whole = _stripped(text, 0, len(text))
    if is_plain:
        whole = _without_tail(text, *whole)
    if whole[0] == whole[1]:
        return []
    if count_tokens(*whole) <= MAX_QUESTION_TOKENS:
        labelled = _labelled(text, whole, count_tokens) if is_plain else None
        return [labelled or whole]
    finder = _Finder(text, whole, count_tokens)
    after = finder.at_end()
    if after.is_sure:
        return after.ranges
    front = finder.in_front()
    if front is None:
        return after.ranges or [whole]
    has_mark = any(_MARK.search(text[low:high]) for low, high in after.ranges)
    if has_mark or not _asks(text[front[0] : front[1]]):  # only a colon, such as "Read this:"
        return [front, *after.ranges[:1]]
    return [front]


def is_tiny(text: str) -> bool:
    """Is it no more than a word or two such as "Answer:"? A question never is."""
    said = text.strip()
    is_short = len(said) < _TINY_CHARS or (len(said.split()) <= _TINY_WORDS and len(said) < 24)
    is_imperative = _IMPERATIVE.match(said) and not said.endswith((":", "："))
    return is_short and not is_imperative and not _MARK_AT_END.search(said)


@dataclass(frozen=True, slots=True)
class _Finder:
    text: str
    whole: Range
    count_tokens: CountTokens

    def at_end(self) -> _Found:
        """What asks at the text's end."""
        labelled = _labelled(self.text, self.whole, self.count_tokens)
        if labelled is not None:
            return _Found(self._parts(labelled), is_sure=True)
        paragraphs = self._last_paragraphs()
        tiny = 0
        while tiny < len(paragraphs) and is_tiny(self._at(paragraphs[tiny])):
            tiny += 1
        passed = paragraphs[:tiny]
        if tiny == len(paragraphs):
            return _Found(passed)
        last, before = paragraphs[tiny], paragraphs[tiny + 1 : tiny + 2]
        said, size = self._at(last), self.count_tokens(*last)
        if size > LONGEST_QUESTION:
            found = self._end_of_document(last)
            ranges = found.ranges + passed if found.is_sure else passed + found.ranges
            return _Found(ranges, found.is_sure)
        line = self._last_line(last)
        if line is not None:
            return _Found([line, *passed], is_sure=True)
        asked = [last, *passed]
        is_sure = _asks(said)
        if before and not _MARK.search(said):
            added = self._belongs(before[0], size, is_last_asking=is_sure)
            if added:
                asked.insert(1, before[0])
                is_sure = is_sure or _asks(self._at(before[0]))
        if sum(self.count_tokens(*r) for r in asked) <= MAX_QUESTION_TOKENS:
            return _Found(asked, is_sure)
        return _Found([part for r in asked for part in self._parts(r)], is_sure)

    def in_front(self) -> Range | None:
        """The first paragraph or line, past a greeting, if it is short and asks."""
        start, end = self.whole
        blocks = closed_blocks(self.text[start : start + _WINDOW])
        end = min(end, start + _WINDOW, *(start + low for low, _ in blocks))
        for low, high in _split(BLANK_LINE, self.text, start, end)[:3]:
            line = _split(_LINE_END, self.text, low, high)[0]
            if _ENDS_ASKING.search(self._at((low, high))):
                line = (low, high) if self._is_short((low, high)) else line
            said = self._at(line)
            is_asked = _asks(said) or _ENDS_ASKING.search(said)
            if is_asked and not is_tiny(said) and self._is_short(line):
                return line
            if not is_tiny(self._at((low, high))):
                break
        return None

    def _at(self, place: Range) -> str:
        return self.text[place[0] : place[1]]

    def _is_short(self, place: Range) -> bool:
        return self.count_tokens(*place) <= MAX_QUESTION_TOKENS

    def _last_paragraphs(self) -> list[Range]:
        """The last paragraphs that are not code, the last one first."""
        start, end = self.whole
        found: list[Range] = []
        blocks = [(low, high) for low, high in closed_blocks(self.text) if low < end]
        for low, high in [*reversed(blocks), (start, start)]:
            prose = max(high, end - _WINDOW, start), end
            if prose[0] < prose[1]:
                found += reversed(_split(BLANK_LINE, self.text, *prose))
            if len(found) >= _MOST_PARAGRAPHS or prose[0] > high:
                break
            end = low
        return found[:_MOST_PARAGRAPHS] or [self.whole]

    def _belongs(self, before: Range, size: int, *, is_last_asking: bool) -> bool:
        """Is `before` part of the question, which ends in a paragraph without question mark?"""
        both = size + self.count_tokens(*before)
        if _MARK_AT_END.search(self._at(before)):
            return both <= LONGEST_QUESTION
        return not is_last_asking and both <= MAX_QUESTION_TOKENS

    def _last_line(self, paragraph: Range) -> Range | None:
        """The last line, if it is short and asks, and is not what line wrapping left of one."""
        lines = _split(_LINE_END, self.text, *paragraph)
        said = self._at(lines[-1])
        if len(lines) < 2 or said[0].islower() or not _asks(said) or not self._is_short(lines[-1]):
            return None
        with_before = lines[-2][0], lines[-1][1]
        if not _MARK.search(said) and _MARK_AT_END.search(self._at(lines[-2])):
            return with_before if self._is_short(with_before) else lines[-1]
        return lines[-1]

    def _end_of_document(self, paragraph: Range) -> _Found:
        line = self._last_line(paragraph)
        if line is not None:
            return _Found([line], is_sure=True)
        low, high = paragraph
        sentences = _sentences(self.text, max(low, high - _WINDOW), high)
        short = [s for s in sentences if self._is_short((s[0], high))]
        if not short:
            return _Found([sentences[-1]], _asks(self._at(sentences[-1])))
        for asks in (_MARK_AT_END.search, _IMPERATIVE.match):
            for sentence in reversed(short):
                if asks(self._at(sentence)):
                    is_sure = asks == _MARK_AT_END.search
                    return _Found([(sentence[0], high)], is_sure)
        return _Found([(short[0][0], high)])

    def _parts(self, place: Range) -> list[Range]:
        """Of a long question: its sentences that end in a question mark, then all of it."""
        if self._is_short(place):
            return [place]
        sentences = reversed(_sentences(self.text, *place))
        return [*(s for s in sentences if _MARK_AT_END.search(self._at(s))), place]


def _asks(text: str) -> bool:
    """See the module's docstring."""
    said = text.strip()
    if _MARK_AT_END.search(said) or _IMPERATIVE.match(said) or _WISH.search(said):
        return True
    return bool(_QUESTION_WORD.match(said)) and not said.endswith((".", "!", ":", ";", ","))


def _labelled(text: str, whole: Range, count_tokens: CountTokens) -> Range | None:
    """What follows the last "Question:", if that is no longer than a question and unanswered."""
    whole = _without_tail(text, *whole)
    window = text[max(whole[0], whole[1] - _WINDOW) : whole[1]]
    labels = list(_LABEL.finditer(window))
    if not labels:
        return None
    asked = _stripped(text, whole[1] - len(window) + labels[-1].end(), whole[1])
    if asked[0] == asked[1] or _ANSWER_LABEL.search(text, *asked):
        return None
    return asked if count_tokens(*asked) <= LONGEST_QUESTION else None


def _without_tail(text: str, low: int, high: int) -> Range:
    """text[low:high] without an "Answer:" at its end, if that is not all of it."""
    tail = _TAIL.search(text, max(low, high - _TAIL_CHARS), high)
    shorter = _stripped(text, low, tail.start()) if tail else (low, low)
    return shorter if shorter[0] < shorter[1] else (low, high)


def _sentences(text: str, low: int, high: int) -> list[Range]:
    """The sentences of text[low:high]; a line that begins with a small letter goes on with one."""
    starts = [low]
    for end in _SENTENCE_END.finditer(text, low, high):
        is_abbreviation = _NO_SENTENCE_END.search(text, max(low, end.start() - 8), end.end())
        goes_on = end.end() < high and text[end.end()].islower()
        if not is_abbreviation and not goes_on:
            starts.append(end.end())
    ranges = [_stripped(text, a, b) for a, b in zip(starts, [*starts[1:], high], strict=True)]
    return [(a, b) for a, b in ranges if a < b]


def _split(separator: re.Pattern[str], text: str, low: int, high: int) -> list[Range]:
    """The parts of text[low:high] between `separator`s, without blanks around them."""
    found = list(separator.finditer(text, low, high))
    starts = [low, *(match.end() for match in found)]
    ends = [*(match.start() for match in found), high]
    parts: Sequence[Range] = [_stripped(text, a, b) for a, b in zip(starts, ends, strict=True)]
    return [(a, b) for a, b in parts if a < b]


def _stripped(text: str, low: int, high: int) -> Range:
    said = text[low:high]
    start = low + len(said) - len(said.lstrip())
    return (start, max(start, low + len(said.rstrip())))
