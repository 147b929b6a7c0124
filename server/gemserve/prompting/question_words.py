"""Patterns of questions and requests, and the paragraphs, lines and sentences of a text."""

from __future__ import annotations

import re

Range = tuple[int, int]  # of characters, half-open

_ANY_LINE_END = r"(?>\r\n|[\n\r\x0b\x0c\x85\u2028\u2029])"
LINE_END = re.compile(_ANY_LINE_END)
BLANK_LINE = re.compile(rf"{_ANY_LINE_END}[^\S\r\n]*{_ANY_LINE_END}")

# Chinese characters, kana, Thai, Lao, Burmese and Khmer
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f]+"
)

_CLOSING = r"[\"'”’»)\]*_]*"
MARK = re.compile(rf"\?{_CLOSING}(?=\s|$)|[？؟⁇]")
MARK_AT_END = re.compile(rf"[?？؟⁇][!.]*{_CLOSING}$")
ASKING_PARAGRAPH = re.compile(
    rf"[?？؟⁇][!.]*{_CLOSING}(?=[^\S\r\n]*{_ANY_LINE_END}[^\S\r\n]*{_ANY_LINE_END})"
)
COLON_AT_END = re.compile(r"[:：][*]*$")

_WORDS_BEFORE = r"\W*(?:(?:and|so|now|then|also|next|finally|first|but|ok|okay|well)\b\W*)*"
_QUESTION_WORDS = (
    "who|whom|whose|what|which|when|where|why|how|is|are|was|were|do|does|did|can|could|would|"
    "will|should|has|have|had"
)
_IMPERATIVES = (
    "please|kindly|summari[sz]e|find|list|answer|explain|describe|tell|give|show|write|translate|"
    "name|identify|extract|compare|classify|count|provide|quote|rewrite|repeat|complete|continue|"
    "fix|review|return|determine|locate|look|report|compute|calculate|choose|select|say|state|"
    "outline|discuss|create|generate|analy[sz]e|help|check|make|solve|print"
)
_WISHES = r"(?:i|we) (?:want|need|would like|wish)|i'd like|let me know"
_PREFACES = r"(?:using|based on|according to|given) (?:the|this|that|these|what)"
QUESTION_WORD = re.compile(rf"{_WORDS_BEFORE}(?:{_QUESTION_WORDS})\b", re.IGNORECASE)
IMPERATIVE = re.compile(
    rf"{_WORDS_BEFORE}(?:{_IMPERATIVES}|{_WISHES}|{_PREFACES})\b", re.IGNORECASE
)
WISH = re.compile(r"\b(?:please|tell me|let me know|(?:can|could) you)\b", re.IGNORECASE)

LABEL = re.compile(
    r"(?:^|(?<=[\n\r])|(?<=[.!?] ))[ \t#*]*(?:question|query|q)[ \t]*\d*[*]*[:：][*]*\s*",
    re.IGNORECASE,
)
ANSWER_LABEL = re.compile(r"(?:^|\s)[#*]*(?:answer|a)[ \t]*\d*[*]*[:：]", re.IGNORECASE)
CONTEXT_LABEL = re.compile(
    r"(?:^|[\n\r])[ \t#*]*(?:(?:retrieved|relevant|given|provided)[ \t]+)?"
    r"(?:context|documents?|sources?|passages?|excerpts?|articles?|search[ \t]results)"
    r"[*]*[ \t]*[:：]",
    re.IGNORECASE,
)
TAIL = re.compile(
    r"(?:^|(?<=\s))[#* \t]*(?:(?:the|your|final|short|correct|best)[ \t]+){0,2}"
    r"(?:answer|a|response|reply|assistant|ai|bot|model|output|result|solution|summary)"
    r"(?:[ \t]+is)?[ \t]*[*]*[:：][*]*\s*$",
    re.IGNORECASE,
)

_GLUED = "|".join(word.capitalize() for word in _QUESTION_WORDS.split("|"))
_SENTENCE_END = re.compile(
    rf"[.!?…]{_CLOSING}\s+|[。！？؟]{_CLOSING}\s*|[\n\r]\s*"
    # people append a question to their document without a blank
    rf"|(?<=[a-z0-9)][.!?])(?=(?:{_GLUED})\b)"
)
_ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|Sr|Jr|No|Fig|Sec|vs|cf|e\.g|i\.e|approx|ca|etc)\.\s*$"
)


def find_sentences(text: str, low: int, high: int) -> list[Range]:
    """The sentences of text[low:high]. A small letter continues a sentence, whatever is before."""
    starts = [low]
    for end in _SENTENCE_END.finditer(text, low, high):
        is_abbreviation = _ABBREVIATION.search(text, max(low, end.start() - 8), end.end())
        goes_on = end.end() < high and text[end.end()].islower()
        if not is_abbreviation and not goes_on:
            starts.append(end.end())
    return _parts(text, starts, [*starts[1:], high])


def split(separator: re.Pattern[str], text: str, low: int, high: int) -> list[Range]:
    """The parts of text[low:high] between separators, without blanks around them."""
    found = list(separator.finditer(text, low, high))
    starts = [low, *(match.end() for match in found)]
    return _parts(text, starts, [*(match.start() for match in found), high])


def stripped(text: str, low: int, high: int) -> Range:
    """The range low..high−1 without the blanks at its ends."""
    part = text[low:high]
    start = low + len(part) - len(part.lstrip())
    return start, max(start, low + len(part.rstrip()))


def _parts(text: str, starts: list[int], ends: list[int]) -> list[Range]:
    parts = [stripped(text, low, high) for low, high in zip(starts, ends, strict=True)]
    return [(low, high) for low, high in parts if low < high]
