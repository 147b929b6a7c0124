"""Which tokens a filter should keep whatever the scores say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemserve.types import Priority, Span

QUESTION_HEAD = 32
QUESTION_TAIL = 64
LONG_MESSAGE = 512
_GUESS = 32  # of a tail without structure, what is taken for the question


def question_spans(start: int, stop: int, question: int | None = None) -> list[Span]:
    """Protect a last user turn at start..stop−1; of one that is itself the document, its ends.

    `question`: where its last paragraph starts, which comes before the rest of its end.
    """
    if stop - start <= QUESTION_HEAD + QUESTION_TAIL:
        return [Span(start, stop, Priority.QUESTION)]
    tail = stop - QUESTION_TAIL
    asked = tail if question is None else max(tail, question)
    spans = [
        Span(asked, stop, Priority.QUESTION),
        Span(start, start + QUESTION_HEAD, Priority.REST),
    ]
    return spans if asked == tail else [*spans, Span(tail, asked, Priority.REST)]


def plain_spans(num_tokens: int, has_bos: bool, question: int | None = None) -> tuple[Span, ...]:
    """Protection of a prompt without roles: BOS and the tail, where the question stands.

    `question`: where its last paragraph starts, if that is known.
    """
    tail = max(0, num_tokens - QUESTION_TAIL)
    asked = max(tail, num_tokens - _GUESS if question is None else question)
    spans = (Span(asked, num_tokens, Priority.QUESTION), Span(tail, asked, Priority.REST))
    return (Span(0, 1, Priority.BOS), *spans) if has_bos else spans


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
        (Priority.REST, int(0.25 * low)),
    )
    for last, limit in limits:
        allowed = [s for s in spans if s.priority <= last]
        chosen = protected_positions(allowed, num_tokens, max(len(chosen), limit))
        sizes.append(len(chosen))
    return Reserved(chosen[: sizes[1]], chosen[sizes[1] :])


def protected_positions(spans: Sequence[Span], num_tokens: int, budget: int) -> list[int]:
    """Positions to keep, at most `budget`, most important first; of one span its end first."""
    chosen: dict[int, None] = {}
    for span in sorted(spans, key=lambda s: (s.priority, -s.start)):
        for position in range(min(span.stop, num_tokens) - 1, max(0, span.start) - 1, -1):
            if len(chosen) == budget:
                return list(chosen)
            chosen.setdefault(position)
    return list(chosen)
