"""Which tokens a filter should keep whatever the scores say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemserve.types import Priority, Span

QUESTION_HEAD = 32
QUESTION_TAIL = 64
LONG_MESSAGE = 512
LONGEST_QUESTION = 256
_SURELY_ASKED = 32  # of the end of a long question, or of a document


def question_spans(start: int, stop: int, paragraphs: Sequence[int] = ()) -> list[Span]:
    """Protect a last user turn at start..stop−1; of one that is itself the document, its ends.

    `paragraphs`: where its last ones start, last first: the question, and what may belong to it. A
    long question keeps its beginning and its end; what is longer still is taken for the document.
    """
    if stop - start <= QUESTION_HEAD + QUESTION_TAIL:
        return [Span(start, stop, Priority.QUESTION)]
    head = Span(start, start + QUESTION_HEAD, Priority.HEAD)
    asked = paragraphs[0] if paragraphs else start
    if stop - asked <= QUESTION_TAIL:
        before = min(p for p in paragraphs if stop - p <= QUESTION_TAIL)
        question = Span(asked, stop, Priority.QUESTION)
        return [question, Span(before, asked, Priority.BEFORE), head]
    end = stop - _SURELY_ASKED
    question = Span(end, stop, Priority.QUESTION)
    if stop - asked <= LONGEST_QUESTION:
        return [question, Span(asked, end, Priority.HEAD), head]
    return [question, head, Span(stop - QUESTION_TAIL, end, Priority.TAIL)]


def plain_spans(num_tokens: int, has_bos: bool, paragraphs: Sequence[int] = ()) -> tuple[Span, ...]:
    """Protect a prompt without roles: BOS, and what is protected of a last turn."""
    spans = question_spans(int(has_bos), num_tokens, paragraphs)
    return (Span(0, 1, Priority.BOS), *spans) if has_bos else tuple(spans)


def message_spans(start: int, stop: int, priority: Priority) -> list[Span]:
    """Protect a message at start..stop−1; of one long enough to be a document, its ends."""
    if stop - start <= LONG_MESSAGE:
        return [Span(start, stop, priority)]
    return [
        Span(stop - QUESTION_TAIL, stop, priority),
        Span(start, start + QUESTION_HEAD, priority),
    ]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Positions kept before any is chosen, most important first; `rest` may matter."""

    firm: list[int]
    rest: list[int]

    @property
    def positions(self) -> list[int]:
        return [*self.firm, *self.rest]


def reserve(spans: Sequence[Span], num_tokens: int, budget: int, low: int) -> Reserved:
    """What is kept of `low` to `budget` tokens before any is chosen.

    The question; then system, tools and the template up to three quarters of the budget, the rest
    up to a quarter of `low`: a filter that may not choose is blind.
    """
    chosen: list[int] = []
    sizes: list[int] = []
    limits = (
        (Priority.QUESTION, budget),
        (Priority.FRAME, int(0.75 * budget)),
        (Priority.TAIL, int(0.25 * low)),
    )
    for last, limit in limits:
        allowed = [s for s in spans if s.priority <= last]
        chosen = protected_positions(allowed, num_tokens, max(len(chosen), limit))
        sizes.append(len(chosen))
    return Reserved(chosen[: sizes[1]], chosen[sizes[1] :])


def protected_positions(spans: Sequence[Span], num_tokens: int, budget: int) -> list[int]:
    """Positions to keep, at most `budget`, most important first.

    Of one span its end comes first, of a head its start.
    """
    chosen: dict[int, None] = {}
    for span in sorted(spans, key=lambda s: (s.priority, -s.start)):
        positions = range(max(0, span.start), min(span.stop, num_tokens))
        for position in positions if span.priority is Priority.HEAD else reversed(positions):
            if len(chosen) == budget:
                return list(chosen)
            chosen.setdefault(position)
    return list(chosen)
