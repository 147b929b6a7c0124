"""One pool of memory for the keys and values of all requests, handed out in spans.

A span is contiguous. The pool counts in units: one unit holds the keys, or the values, of one token
in one layer. A filter pass needs few layers of all tokens, generation needs all layers of few
tokens; both get spans from this pool. A span may shrink in place, and its last units are free at
once. When free units are scattered, `compact` closes the gaps.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True, order=True)
class Span:
    """`size` units from `start` on. Compaction changes `start`, so do not keep it."""

    start: int
    size: int = field(compare=False)
    references: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `size` units from `source` down to `target`; the two ranges may overlap."""

    source: int
    target: int
    size: int


class MemoryPool:
    """First-fit allocation of spans in 0..capacity−1. The runner owns the bytes."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._spans: list[Span] = []  # sorted by start
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def free(self) -> int:
        return self.capacity - self._used

    def allocate(self, size: int) -> Span | None:
        """A span of `size` units, or None if no gap is that long (see `compact`)."""
        assert size > 0
        end = 0
        for span in self._spans:
            if span.start - end >= size:
                break
            end = span.start + span.size
        if self.capacity - end < size:
            return None
        made = Span(end, size)
        insort(self._spans, made)
        self._used += size
        return made

    def shrink(self, span: Span, size: int) -> None:
        """Keep the first `size` units of `span`."""
        assert 0 < size <= span.size
        self._used -= span.size - size
        span.size = size

    def retain(self, span: Span) -> None:
        """Add an owner."""
        assert span.references > 0
        span.references += 1

    def release(self, span: Span) -> None:
        """Drop an owner; the last one frees the units."""
        assert span.references > 0
        span.references -= 1
        if span.references == 0:
            self._spans.remove(span)
            self._used -= span.size

    def compact(self) -> list[Move]:
        """Move every span down. The caller must carry out the moves, in order, at once."""
        moves: list[Move] = []
        end = 0
        for span in self._spans:
            if span.start != end:
                moves.append(Move(span.start, end, span.size))
                span.start = end
            end += span.size
        return moves

    def check_integrity(self) -> None:
        """Check that no span leaks, overlaps or lies outside. Raises `AssertionError`."""
        end = 0
        for span in self._spans:
            assert span.size > 0, span
            assert span.references > 0, span
            assert span.start >= end, f"{span} overlaps the span before it"
            end = span.start + span.size
        assert end <= self.capacity, f"spans end at {end}, capacity is {self.capacity}"
        total = sum(span.size for span in self._spans)
        assert total == self._used, f"{total} units in spans, {self._used} counted"
