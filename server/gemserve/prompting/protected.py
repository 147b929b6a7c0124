"""The ranges of a prompt's tokens that a filter should keep whatever the scores say."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemserve.contract.filter_options import FAR_FROM_END
from gemserve.contract.prompt_parts import SHORT_TURN, Priority, ProtectedRange, TextBreaks
from gemserve.prompting.question_words import BLANK_LINE
from gemserve.ranges import Ranges, as_ranges

QUESTION_HEAD = 32
QUESTION_TAIL = 64
LONGEST_QUESTION = 256
_SURELY_ASKED = 32  # of the end of a document
_MOST_BLANKS = 4  # tokens of the blank line before a question, which are kept with it: \r\n\r\n
_END_CHARS = 2048  # more than the tokens protected at a prompt's end take up
_SHORTEST_QUESTION = 12  # characters
_MOST_PARAGRAPHS = 8  # that may belong to a question


def question_ranges(
    start: int, stop: int, paragraphs: Sequence[int] = (), short: int = SHORT_TURN
) -> list[ProtectedRange]:
    """Protect a last user turn at start..stop−1; of one that is the document itself, its ends.

    `paragraphs` are the starts of its last paragraphs, the last one first: the question, and what
    may belong to it. A question of more than `LONGEST_QUESTION` tokens is taken for the document. A
    turn of up to `short` tokens is protected whole.
    """
    if stop - start <= short:
        return [ProtectedRange(start, stop, Priority.QUESTION)]
    head = ProtectedRange(start, start + QUESTION_HEAD, Priority.HEAD)
    question_start = paragraphs[0] if paragraphs else start
    if stop - question_start <= QUESTION_TAIL:
        before = min(p for p in paragraphs if stop - p <= QUESTION_TAIL)
        question = ProtectedRange(question_start, stop, Priority.QUESTION)
        return [question, ProtectedRange(before, question_start, Priority.BEFORE), head]
    if stop - question_start <= LONGEST_QUESTION:
        return [ProtectedRange(question_start, stop, Priority.QUESTION), head]
    end = stop - _SURELY_ASKED
    question = ProtectedRange(end, stop, Priority.QUESTION)
    return [question, head, ProtectedRange(stop - QUESTION_TAIL, end, Priority.END)]


def plain_ranges(
    num_tokens: int, has_bos: bool, paragraphs: Sequence[int] = ()
) -> tuple[ProtectedRange, ...]:
    """Protect a prompt without roles: BOS, and what would be protected of a last user turn."""
    ranges = question_ranges(int(has_bos), num_tokens, paragraphs)
    return (ProtectedRange(0, 1, Priority.BOS), *ranges) if has_bos else tuple(ranges)


def with_question(
    tokenizer: Any,
    ids: Sequence[int],
    ranges: Sequence[ProtectedRange],
    question: Ranges,
    answer_start: int,
) -> tuple[ProtectedRange, ...]:
    """`ranges`, and the question where it has no better protection than a document's ends.

    The blank line before the question is protected, too. Without it the question would follow in
    the middle of whatever was kept last, and small models take it for a part of that.

    What was protected as the question but stands far behind it is the end of its document. This
    is not so from `answer_start` on: there the chat template or the user begins the answer.
    """
    if question:
        end = question[-1][1] + FAR_FROM_END
        ranges = [part for r in ranges for part in _without_document(r, end, answer_start)]
    covered = {
        position
        for protected in ranges
        if protected.priority < Priority.HEAD
        for position in range(*_overlap(protected, question))
    }
    added = [p for start, stop in question for p in range(start, stop) if p not in covered]
    everything = [
        *ranges,
        *(ProtectedRange(*found, Priority.QUESTION) for found in as_ranges(added)),
    ]
    starts = {start: start - _num_blanks_before(tokenizer, ids, start) for start, _ in question}
    return tuple(
        replace(protected, start=starts.get(protected.start, protected.start))
        if protected.priority is Priority.QUESTION
        else protected
        for protected in everything
    )


def whole_sentences(
    ranges: Sequence[ProtectedRange], breaks: TextBreaks, has_question: bool
) -> tuple[ProtectedRange, ...]:
    """`ranges`, of which those at a document's ends have whole sentences or lines, or are left out.

    Half a sentence says nothing, and misleads a small model. The end of a request, which may be
    what it asks, is left out if a question was found (`has_question`).
    """
    cuts = sorted({*breaks.paragraphs, *breaks.sentences, *breaks.lines})
    trimmed = []
    for each in ranges:
        if each.priority is Priority.HEAD:
            before = bisect_right(cuts, each.stop)
            trimmed.append(replace(each, stop=cuts[before - 1] if before else each.start))
        elif each.priority is Priority.TAIL:
            behind = bisect_left(cuts, each.start)
            start = cuts[behind] if behind < len(cuts) else each.stop
            trimmed.append(replace(each, start=start))
        elif each.priority is not Priority.END or not has_question:
            trimmed.append(each)
    return tuple(each for each in trimmed if each.start < each.stop)


def _without_document(
    protected: ProtectedRange, question_end: int, answer_start: int
) -> list[ProtectedRange]:
    """The range, with a lower priority for what is the document's end: see `with_question`."""
    if protected.priority is not Priority.QUESTION or protected.start <= question_end:
        return [protected]
    border = min(max(protected.start, answer_start), protected.stop)
    parts = (
        replace(protected, stop=border, priority=Priority.END),
        replace(protected, start=border),
    )
    return [part for part in parts if part.start < part.stop]


def _num_blanks_before(tokenizer: Any, ids: Sequence[int], start: int) -> int:
    """How many blank tokens stand just before a position; `_MOST_BLANKS` at most."""
    for count in range(min(_MOST_BLANKS, start)):
        token = [ids[start - 1 - count]]
        text: str = tokenizer.backend_tokenizer.decode(token, skip_special_tokens=False)
        if text.strip():
            return count
    return min(_MOST_BLANKS, start)


def _overlap(protected: ProtectedRange, question: Ranges) -> tuple[int, int]:
    if not question:
        return 0, 0
    return max(protected.start, question[0][0]), min(protected.stop, question[-1][1])


def last_paragraphs(text: str) -> list[str]:
    """The ends of a text that begin with its last paragraph, the one before it, and so on.

    At most `_MOST_PARAGRAPHS`. An end of only a word or two, such as "Answer:", is left out.
    """
    end = text[-_END_CHARS:]
    starts = [match.end() for match in BLANK_LINE.finditer(end)]
    ends = [end[start:] for start in reversed(starts)]
    found = [end for end in ends if len(end.strip()) >= _SHORTEST_QUESTION]
    return found[:_MOST_PARAGRAPHS] or [end]
