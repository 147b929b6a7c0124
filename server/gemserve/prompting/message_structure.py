"""Tells documents from instructions within one message, by structure.

Retrieval frameworks put documents into a system message or into the user's, and agents put
instructions into the user's turns. Tags, separators and labels tell them apart:

- A document is what tags such as <context>, <documents> or <file> enclose; what follows a line of
  eight or more equal signs, if the text before speaks of a context, up to the last such line; what
  follows a label such as "Context:", up to one such as "Question:"; what stands between a line such
  as "Here are the relevant documents:" and one such as "Instruction:"; and, in a user's turn, a
  fenced block of code. All of these only if they are long.
- A user's turn that begins like "Observation:" or "[read_file] Result:" behind an assistant's that
  ends with a call is what a tool gave: agents without calls of the template's send it so.
- In a user's turn, an instruction is what tags such as <system-reminder> enclose, unless it says
  that it is what a tool returned.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from gemserve.prompting.code_blocks import closed_blocks
from gemserve.ranges import Ranges

FEWEST_CHARS = 2000  # of a document; less is read whole
_FEWEST_LABELLED_CHARS = 4000  # separators and labels are weaker signs than tags
_CUE_CHARS = 300
_TAG = re.compile(r"^[ \t]*<([A-Za-z][\w.:-]{0,40})((?:\s[^<>\n]{0,500})?)>", re.MULTILINE)
_CLOSING_TAG = re.compile(r"</([A-Za-z][\w.:-]{0,40})>")
_DOCUMENT_NAMES = (
    "doc|docs|document|documents|context|contexts|file|files|source|sources|passage|passages|text|"
    "texts|article|articles|content|contents|data|page|pages|chunk|chunks|excerpt|excerpts|"
    "results?|search[-_]?results?|retrieved[-_]?\\w+|knowledge|knowledge[-_]?base|references?|book|"
    "transcript|email|emails|report|paper|story|chapter|attachments?|input|log|logs|history|"
    "conversation|repository|code|codebase|diff"
)
_DOCUMENT_NAME = re.compile(rf"(?:{_DOCUMENT_NAMES})(?:[-_]?\d+)?", re.IGNORECASE)
_INSTRUCTION_NAME = re.compile(
    r".*(?:instruction|reminder|rule|guideline|polic(?:y|ies)|permission|persona|skill|preference)"
    r".*|system|environment(?:[-_]\w+)?|env|user[-_]info|collaboration[-_]mode",
    re.IGNORECASE,
)
_RESULT = re.compile(r"[ \t]*<[^<>]*>\s*(?:results?|outputs?) of\b", re.IGNORECASE)
_RESULT_TURN = re.compile(
    r"\s*(?:[#*]*observations?[*]*[ \t]*[:：]"
    r"|\[[\w.:-]+(?:[ \t][^\n]{0,500})?\][ \t]*(?:result|output)s?[ \t]*:"
    r"|<(?:tool_response|tool_result|tool_output|function_results?|observation)[ \t>])",
    re.IGNORECASE,
)
_CALL_CHARS = 8192  # at the end of an assistant's turn, where calls stand
_CALL_IN_TEXT = re.compile(
    r"^[ \t#*]*action\b|<(?:[a-z]+_[a-z_]+|function|invoke|tool)\b|^[ \t]*```"
    r"|\{\s*\"(?:name|tool|action|function)\"\s*:",
    re.IGNORECASE | re.MULTILINE,
)
_SEPARATOR = re.compile(r"^[ \t]*([-=*_#~])\1{7,}[ \t]*$", re.MULTILINE)
_CUE = re.compile(
    r"\b(?:context|documents?|passages?|excerpts?|sources?|articles?|retrieved|knowledge[ -]base|"
    r"search results|information is below)\b",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"^[ \t]*(?:#+[ \t]*)?[*_]{0,2}(?:retrieved[ \t]+|relevant[ \t]+|given[ \t]+|provided[ \t]+)?"
    r"(?:context(?:[ \t]+information)?|documents?|sources?|search results|passages?|excerpts?|"
    r"articles?|knowledge(?:[ \t]+base)?|transcript)[*_]{0,2}[ \t]*:[*_]{0,2}[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_ANNOUNCEMENT = re.compile(
    r"^[ \t]*(?:(?:here|below) (?:is|are)|the following (?:is|are)|these are|use the following)"
    r"\b[^\n:]{0,100}"
    r"\b(?:documents?|context|passages?|excerpts?|sources?|articles?|search results)\b"
    r"[^\n:]{0,60}:[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_END_LABEL = re.compile(
    r"^[ \t]*(?:#+[ \t]*)?[*_]{0,2}(?:user[ \t]+)?(?:question|query|task|instructions?|request|"
    r"answer|rules)[*_]{0,2}[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)


def find_documents(text: str, *, is_system: bool) -> Ranges:
    """The ranges of characters that are long documents, ascending.

    `is_system`: of a system message, whose blocks of code are examples.
    """
    found = [*_enclosed(text, _DOCUMENT_NAME), *_separated(text), *_labelled(text)]
    if not is_system:
        found += closed_blocks(text)
        tagged = _enclosed(text, _INSTRUCTION_NAME, with_tags=True)
        found += [(low, high) for low, high in tagged if _RESULT.match(text, low)]
    joined: list[tuple[int, int]] = []
    for low, high in sorted(found):
        # neighbours such as <document index="1"> and <document index="2"> are one
        if joined and (low <= joined[-1][1] or _is_tags_alone(text[joined[-1][1] : low])):
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple((low, high) for low, high in joined if high - low >= FEWEST_CHARS)


def find_instructions(text: str) -> Ranges:
    """The ranges of characters of a user's turn that are tagged as instructions, with the tags."""
    tagged = _enclosed(text, _INSTRUCTION_NAME, with_tags=True)
    return tuple((low, high) for low, high in tagged if not _RESULT.match(text, low))


def is_result(text: str, before: str) -> bool:
    """Is a user's turn what a tool gave? `before`: the assistant's turn in front of it."""
    if _RESULT_TURN.match(text) is None:
        return False
    return _CALL_IN_TEXT.search(before[-_CALL_CHARS:]) is not None


def request_range(text: str) -> tuple[int, int]:
    """The range of a user's turn without tagged instructions and blanks at its ends."""
    low, high = 0, len(text)
    tagged = find_instructions(text)
    for start, stop in tagged:
        if text[low:start].strip():
            break
        low = stop
    for start, stop in reversed(tagged):
        if start < low or text[stop:high].strip():
            break
        high = start
    part = text[low:high]
    start = low + len(part) - len(part.lstrip())
    return start, max(start, low + len(part.rstrip()))


def _enclosed(
    text: str, name: re.Pattern[str], *, with_tags: bool = False
) -> Iterator[tuple[int, int]]:
    """What tags of such names enclose, the outermost only."""
    at = 0
    # found at once: many opening tags, each looked for up to the end of the text, would take long
    closings: defaultdict[str, list[int]] = defaultdict(list)
    for closing in _CLOSING_TAG.finditer(text):
        closings[closing[1]].append(closing.start())
    while opening := _TAG.search(text, at):
        at = opening.end()
        tag, ends = f"<{opening[1]}>", closings.get(opening[1], [])
        number = bisect_left(ends, at)
        is_closed = number < len(ends) and not opening[2].endswith("/")
        if not is_closed or not name.fullmatch(opening[1]):
            continue
        depth = text.count(tag, at, ends[number])  # it may enclose tags of the same name
        while depth and number + 1 < len(ends):
            depth += text.count(tag, ends[number], ends[number + 1]) - 1
            number += 1
        end = ends[number]
        stop = end + len(f"</{opening[1]}>")
        yield (opening.start(), stop) if with_tags else (at, end)
        at = stop


def _separated(text: str) -> Iterator[tuple[int, int]]:
    """What follows the first separator; what follows the last one too, unless it is short."""
    separators = list(_SEPARATOR.finditer(text))
    if not separators:
        return
    first, last = separators[0], separators[-1]
    if not _CUE.search(text[max(0, first.start() - _CUE_CHARS) : first.start()]):
        return
    is_closed = len(separators) > 1 and len(text) - last.end() < FEWEST_CHARS
    low, high = first.end(), last.start() if is_closed else len(text)
    if high - low >= _FEWEST_LABELLED_CHARS:
        yield low, high


def _labelled(text: str) -> Iterator[tuple[int, int]]:
    labels = {match.end(): True for match in _ANNOUNCEMENT.finditer(text)}
    labels |= {match.end(): False for match in _LABEL.finditer(text)}
    starts = sorted(labels)
    for low, until in pairwise([*starts, len(text)]):
        end = _END_LABEL.search(text, low, until)
        # a sentence may announce instructions, too, so what follows it must end like a document
        if end is None and labels[low]:
            continue
        high = end.start() if end else until
        if high - low >= _FEWEST_LABELLED_CHARS:
            yield low, high


def _is_tags_alone(text: str) -> bool:
    return not re.sub(r"</?[A-Za-z][^<>\n]{0,500}>", "", text).strip()
