"""One pool of memory for the keys and values of all requests, handed out in spans.

A span is contiguous, and may have several owners. The pool counts in units: one unit holds the
keys, or the values, of one token in one layer. A filter pass needs few layers of all tokens,
generation needs all layers of few tokens; both get spans from this pool. A span may shrink in
place, and its last units are free at once. When free units are scattered, `compact` closes gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gemserve.kv_layout import WindowRoom


@dataclass(slots=True, order=True)
class Span:
    """`size` units from `start` on. Compaction changes `start`, so do not keep it.

    `is_private`: whatever of it becomes free is overwritten with zeros. `ids`: the stored documents
    that its tokens are of.
    """

    start: int
    size: int = field(compare=False)
    references: int = field(default=1, compare=False)
    is_private: bool = field(default=False, compare=False)
    ids: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where some tokens of a pass are: `count` of `capacity` tokens, from unit `start` on.

    They begin with the token at slot `first`.
    """

    start: int
    capacity: int
    count: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where the keys and values of a pass are, as numbers.

    `shared`: its first tokens, which other passes have computed. The others are in room of its own
    for `capacity` tokens, from unit `start` on. `room`: that of layers with a sliding window, if
    the model has any and the pass goes through all layers.
    """

    start: int
    capacity: int
    shared: tuple[Stretch, ...] = ()
    room: WindowRoom | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MemoryShare:
    """The first `count` of the `capacity` tokens that `span` has room for.

    Whoever has a share is one of the span's owners: see `MemoryPool.retain`. `room`: see `KVPlace`.
    """

    span: Span
    capacity: int
    count: int
    room: WindowRoom | None = None

    @property
    def stretch(self) -> Stretch:
        return Stretch(self.span.start, self.capacity, self.count)


def first_tokens(shares: Iterable[MemoryShare], count: int) -> tuple[MemoryShare, ...]:
    """The shares that have the first `count` tokens of what `shares` has."""
    taken: list[MemoryShare] = []
    for share in shares:
        if count <= 0:
            break
        taken.append(replace(share, count=min(share.count, count)))
        count -= share.count
    return tuple(taken)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `size` units from `source` down to `target`; the two ranges may overlap."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """Overwrite `size` units from `start` on with zeros."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Repack:
    """Lay out `num_rows` rows of `old` units each, from `start` on, with `new` units each.

    The first `new` units of every row stay. The rows lie one behind the other before and after, and
    behind them `tail` units.
    """

    start: int
    num_rows: int
    old: int
    new: int
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Copied:
    """Copy `size` units from `source` to `target`; the two ranges do not overlap."""

    source: int
    target: int
    size: int


Change = Move | Wipe | Repack | Copied


class MemoryPool:
    """First-fit allocation of spans in 0..capacity−1. The runner owns the bytes.

    What must be done with the bytes is listed in order: see `take_changes`.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self._spans: list[Span] = []  # sorted by start
        self._used = 0
        self._changes: list[Change] = []
        self.num_changes = 0  # of spans and their owners

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
        self.num_changes += 1
        made = Span(end, size)
        insort(self._spans, made)
        self._used += size
        return made

    def shrink(self, span: Span, size: int) -> None:
        """Keep the first `size` units of `span`."""
        assert 0 < size <= span.size
        self.num_changes += 1
        self._used -= span.size - size
        self._wipe(span, span.start + size, span.size - size)
        span.size = size

    def copy(self, start: int, span: Span) -> None:
        """Fill `span` with a copy of the units from `start` on."""
        self._changes.append(Copied(start, span.start, span.size))

    def repack(self, span: Span, areas: Iterable[tuple[int, int, int]]) -> None:
        """Keep the first units of each row of a span, which consists of areas of equal rows.

        An area is how many rows it has, how many units each of them, and how many of these stay.
        """
        start, left = span.start, span.size
        for num_rows, old, new in areas:
            left -= num_rows * old
            if num_rows and new < old:
                self._changes.append(Repack(start, num_rows, old, new, left))
            start += num_rows * new
        assert left == 0, (span, left)
        self.shrink(span, start - span.start)

    def retain(self, span: Span) -> None:
        """Add an owner."""
        assert span.references > 0
        self.num_changes += 1
        span.references += 1

    def release(self, span: Span) -> None:
        """Drop an owner; the last one frees the units."""
        assert span.references > 0
        self.num_changes += 1
        span.references -= 1
        if span.references == 0:
            index = bisect_left(self._spans, span)
            assert self._spans[index] is span
            del self._spans[index]
            self._used -= span.size
            self._wipe(span, span.start, span.size)

    def compact(self, size: int, fixed: Iterable[Span] = ()) -> bool:
        """Move spans down so that `size` free units lie together, as few units as possible.

        So many units must be free. All spans between two gaps move, and the gaps become one. False,
        and nothing has moved, if some of `fixed`, which must stay, are in the way.
        """
        assert size <= self.free
        move = _cheapest_move(self._spans, self.capacity, size, frozenset(map(id, fixed)))
        if move is None:
            return False
        first, last = move
        end = _end_of(self._spans, first - 1)
        old_end = _end_of(self._spans, last)
        is_private = False
        for span in self._spans[first : last + 1]:
            if span.start != end:
                self._changes.append(Move(span.start, end, span.size))
                span.start = end
                is_private |= span.is_private
            end += span.size
        if is_private:  # what is left of a private span at its old place
            self._changes.append(Wipe(end, old_end - end))
        return True

    def has_place(self, size: int, fixed: Collection[Span], without: Iterable[Span] = ()) -> bool:
        """Could `compact` find `size` units around `fixed`, if those `without` were free?"""
        left_out = frozenset(map(id, without))
        spans = [span for span in self._spans if id(span) not in left_out]
        return _cheapest_move(spans, self.capacity, size, frozenset(map(id, fixed))) is not None

    def num_moved(self, size: int, without: Iterable[Span] = ()) -> int:
        """Units that `compact` would move for a span of `size`, if those `without` were free."""
        left_out = frozenset(map(id, without))
        spans = [span for span in self._spans if id(span) not in left_out]
        first, last = _cheapest_move(spans, self.capacity, size) or (0, -1)
        return sum(span.size for span in spans[first : last + 1])

    def take_changes(self) -> list[Change]:
        """What must be done with the bytes since the last call. The caller does it, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check_owners(self, owned: Iterable[Span]) -> None:
        """Check that each span has as many owners as `owned` names it. Raises `AssertionError`."""
        counts = Counter(map(id, owned))
        for span in self._spans:
            count = counts.pop(id(span), 0)
            assert count == span.references, f"{span} has {count} owners"
        assert not counts, "something owns a span that is free"

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

    def _wipe(self, span: Span, start: int, size: int) -> None:
        if span.is_private and size:
            self._changes.append(Wipe(start, size))


def _cheapest_move(
    spans: Sequence[Span], capacity: int, size: int, fixed: frozenset[int] = frozenset()
) -> tuple[int, int] | None:
    """The first and the last of the spans to move; they lie between gaps of `size` in all.

    If one gap is long enough, the last one is before the first one. `fixed`: ids of spans that must
    stay. None if all such gaps have one of them between them.
    """
    ends = [_end_of(spans, i - 1) for i in range(len(spans) + 1)]
    starts = [span.start for span in spans] + [capacity]
    gaps = [start - end for start, end in zip(starts, ends, strict=True)]
    best: tuple[int, int] | None = None
    least, first, free, moved = capacity + 1, 0, 0, 0
    for last, gap in enumerate(gaps):  # gap `i` is in front of span `i`
        free += gap
        while free - gaps[first] >= size:
            free -= gaps[first]
            moved -= spans[first].size
            first += 1
        if free >= size and moved < least:
            best, least = (first, last - 1), moved
        if last < len(spans):
            moved += spans[last].size
            if id(spans[last]) in fixed:
                first, free, moved = last + 1, 0, 0
    return best


def _end_of(spans: Sequence[Span], index: int) -> int:
    """Where the span of that index ends; 0 before the first one."""
    return spans[index].start + spans[index].size if index >= 0 else 0
