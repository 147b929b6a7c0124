"""How decode steps, and the time between them, are shared between tenants.

All sequences of a decode step wait for its end. So if one tenant decodes hundreds of sequences,
each token of another tenant's stream takes as long as hundreds. What is divided is a cycle: a
decode step and the reading after it. The tenant with the least to do has as much of it as it would
have alone, its own prompts included. Each other tenant has as long, or `_HEAVIER` times as long if
it has far more to do, for its sequences in the step and its prompts. So of n tenants none that
decodes gets its tokens slower than at 1/n of the pace that it would have alone. A tenant with more
sequences than fit leaves some out of the step, in turn; they keep their memory and miss nothing
else. Where one sequence of each other tenant is too much already, some steps have none of them.

How long a step takes with so many sequences is learned. Where it takes hardly longer with many, as
on a GPU, none are left out. With one tenant, or without keys, nothing here applies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gemserve.engine.sequence.sequence import LiveSequence

# Most seconds of a step, decode or reading, while another tenant's request may come at any time:
# it waits for the step's end.
SHARED_STEP_S = 0.03
# A tenant counts as present for so long after its last request has ended.
PRESENT_S = 10.0
# How much time a tenant has for each second of the one with the least to do, if it has more than
# `_FAR_MORE` times as many sequences. Not all of its work is counted here: texts, the event loop,
# and caches that are cold after it.
_HEAVIER = 0.5
_FAR_MORE = 2
# The least reading of a tenant in each cycle, as a part of the least tenant's decode step, so that
# its prompts advance whatever a step of all tenants takes.
_LEAST_READING = 0.25
# How many steps have the others' sequences at most, where some are left out and where none are. In
# the rest it is learned what a step of the least tenant takes; what was known of it grows old.
_MOST_JOINED_LIMITED, _MOST_JOINED = 0.95, 0.99
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """How many sequences of one tenant decode, and how many have prompts that are not read yet."""

    decoding: int
    unread: int
    tenant: bytes = b""

    @property
    def size(self) -> int:
        return self.decoding + self.unread


@dataclass(frozen=True, slots=True)
class Portion:
    """What one cycle may have.

    `rows`: most sequences of each tenant in the decode step. `reading_s`: seconds of reading
    prompts for each decode step; None: as for one tenant, because only one has work, or nobody
    decodes. `reading_of`: how that is divided among tenants that have prompts: each has so many
    parts. `least`: the tenant with the least to do, which has sequences in every decode step.
    `joined`: in which part of them the other tenants have some, too.
    """

    rows: int
    reading_s: float | None
    reading_of: Mapping[bytes, float] = field(default_factory=dict)
    least: bytes = b""
    joined: float = 1.0


class StepTimes:
    """Learns how many seconds a decode step takes with so many sequences.

    It keeps a smoothed point for each power of two, and draws lines between them. `row_share`:
    outside of what is known, a sequence more takes this part of what those known take each.
    """

    def __init__(self, row_share: float = 1.0) -> None:
        self._row_share = row_share
        self._points: dict[int, tuple[float, float]] = {}  # sequences and seconds

    def observe(self, num_rows: int, seconds: float) -> None:
        """Note that a step of `num_rows` > 0 sequences took `seconds`."""
        rows, known_s = self._points.get(num_rows.bit_length(), (num_rows, seconds))
        point = rows + _SMOOTHING * (num_rows - rows), known_s + _SMOOTHING * (seconds - known_s)
        self._points[num_rows.bit_length()] = point

    def seconds_of(self, num_rows: int) -> float:
        """Seconds of a step; 0 before one has been observed."""
        points = [self._points[bits] for bits in sorted(self._points)]
        if not points:
            return 0.0
        index = bisect_left(points, (num_rows, 0.0))
        if index in (0, len(points)):
            rows, seconds = points[min(index, len(points) - 1)]
            return seconds * (1 + self._row_share * (num_rows / rows - 1))
        (fewer, low_s), (more, high_s) = points[index - 1 : index + 1]
        return low_s + (max(high_s, low_s) - low_s) * (num_rows - fewer) / (more - fewer)


class Presence:
    """Which tenants have requests, or had some lately."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._left_s: dict[bytes, float] = {}

    def arrive(self, tenant: bytes) -> None:
        self._counts[tenant] += 1

    def leave(self, tenant: bytes, now_s: float) -> None:
        """Note that one of the tenant's requests has ended."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
            self._left_s[tenant] = now_s

    def is_shared(self, now_s: float) -> bool:
        """Is there more than one tenant?"""
        if len(self._counts) > 1:
            return True
        self._left_s = {t: s for t, s in self._left_s.items() if s + PRESENT_S > now_s}
        return len(self._counts.keys() | self._left_s.keys()) > 1


def loads_of(
    sequences: Iterable[LiveSequence], is_decoding: Callable[[LiveSequence], bool]
) -> list[TenantLoad]:
    """The load of each tenant that has sequences."""
    decoding: Counter[bytes] = Counter()
    unread: Counter[bytes] = Counter()
    for sequence in sequences:
        (decoding if is_decoding(sequence) else unread)[sequence.request.tenant] += 1
    tenants = decoding.keys() | unread.keys()
    return [TenantLoad(decoding[tenant], unread[tenant], tenant) for tenant in sorted(tenants)]


def divide(
    loads: Sequence[TenantLoad],
    seconds_of: Callable[[int], float],
    reading_of: Callable[[TenantLoad], float],
) -> Portion:
    """What a cycle may have while several tenants have work, or may have some at any time.

    `seconds_of`: of a decode step, by its sequences. `reading_of`: how many times as long as its
    decode step one tenant alone, which decodes, would read its own prompts.
    """
    counts = [load.decoding for load in loads if load.decoding]
    if not counts:
        return Portion(1, None)
    most_s = max(SHARED_STEP_S, len(loads) * seconds_of(1))
    most = _level(counts, most_s, seconds_of)
    if len(loads) == 1:
        return Portion(most, None)

    def cycle_s(load: TenantLoad) -> float:
        return seconds_of(min(load.decoding, most)) * (1 + reading_of(load))

    decoding = [load for load in loads if load.decoding]
    least = min(decoding, key=lambda load: (cycle_s(load), load.size))
    least_s = seconds_of(min(least.decoding, most))
    others = [load for load in loads if load is not least]
    most_size = _FAR_MORE * least.size
    given_s = [cycle_s(least) * (1.0 if each.size <= most_size else _HEAVIER) for each in others]
    # of what tenants with sequences and prompts have, half is for either
    for_rows_s = sum(
        seconds / 2 if each.unread else seconds
        for each, seconds in zip(others, given_s, strict=True)
        if each.decoding
    )
    least_rows = min(least.decoding, most)
    rows = max(least_rows, min(most, _level(counts, least_s + for_rows_s, seconds_of)))
    num_others = _num_rows(counts, rows) - least_rows
    joined = 1.0
    if num_others:
        others_s = seconds_of(num_others + least_rows) - least_s
        joined = _MOST_JOINED_LIMITED if rows < max(counts) else _MOST_JOINED
        if others_s > for_rows_s:
            joined = min(joined, for_rows_s / others_s)
        row_s = joined * others_s / num_others
    reading = {least.tenant: least_s * reading_of(least)} if least.unread else {}
    for each, seconds in zip(others, given_s, strict=True):
        if each.unread:
            left_s = seconds - (row_s * min(each.decoding, rows) if each.decoding else 0.0)
            if each.decoding:  # it would not read for longer if it were alone
                left_s = min(left_s, seconds_of(min(each.decoding, rows)) * reading_of(each))
            reading[each.tenant] = max(left_s, _LEAST_READING * least_s)
    return Portion(rows, sum(reading.values()), reading, least.tenant, joined)


class TimeTurns:
    """Whose turn it is to be in a decode step."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._joined = 0.0  # the others' sequences are in the step in which it becomes 1

    def choose(self, decoding: Sequence[LiveSequence], portion: Portion) -> list[LiveSequence]:
        """At most `portion.rows` sequences of each tenant, first those that have waited longest.

        In a part of the steps they are all of the tenant with the least to do: `portion.joined`.
        """
        self._joined += portion.joined
        if self._joined < 1.0:
            decoding = [s for s in decoding if s.request.tenant == portion.least] or decoding
        else:
            self._joined -= 1.0
        of_tenants: Mapping[bytes, list[LiveSequence]] = defaultdict(list)
        for sequence in decoding:
            of_tenants[sequence.request.tenant].append(sequence)
        taken: set[int] = set()
        for some in of_tenants.values():
            some.sort(key=lambda s: s.decoded_at)
            for sequence in some[: portion.rows]:
                sequence.decoded_at = next(self._numbers)
                taken.add(sequence.order)
        return [sequence for sequence in decoding if sequence.order in taken]


def _num_rows(counts: Iterable[int], most: int) -> int:
    return sum(min(count, most) for count in counts)


def _level(counts: Sequence[int], limit_s: float, seconds_of: Callable[[int], float]) -> int:
    """The most sequences of each tenant, at least 1, with which a step takes `limit_s` at most."""
    low, high = 1, max(counts)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds_of(_num_rows(counts, middle)) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
