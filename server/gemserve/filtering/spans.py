"""Which tokens a filter should keep whatever the scores say."""

from __future__ import annotations

from collections.abc import Sequence

from gemserve.types import Priority, Span

QUESTION_HEAD = 32
QUESTION_TAIL = 64


def question_spans(start: int, stop: int) -> list[Span]:
    """Protect a last user turn at start..stop−1; of one that is itself the document, its ends."""
    if stop - start <= QUESTION_HEAD + QUESTION_TAIL:
        return [Span(start, stop, Priority.QUESTION)]
    return [
        Span(stop - QUESTION_TAIL, stop, Priority.QUESTION),
        Span(start, start + QUESTION_HEAD, Priority.REST),
    ]


def plain_spans(num_tokens: int, has_bos: bool) -> tuple[Span, ...]:
    """Protection of a prompt without structure: BOS and the tail, where the question stands."""
    tail = Span(max(0, num_tokens - QUESTION_TAIL), num_tokens, Priority.QUESTION)
    return (Span(0, 1, Priority.BOS), tail) if has_bos else (tail,)


def protected_positions(spans: Sequence[Span], num_tokens: int, budget: int) -> list[int]:
    """Positions to keep, at most `budget`, most important first; of one span its end first."""
    chosen: dict[int, None] = {}
    for span in sorted(spans, key=lambda s: (s.priority, -s.start)):
        for position in range(min(span.stop, num_tokens) - 1, max(0, span.start) - 1, -1):
            if len(chosen) == budget:
                return list(chosen)
            chosen.setdefault(position)
    return list(chosen)
