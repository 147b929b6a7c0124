"""How decode steps, and the time between them, are shared between tenants.

All sequences of a decode step wait for its end. So if one tenant decodes hundreds of sequences,
each token of another tenant's stream takes as long as hundreds. The rule here: of n tenants with
work, none that decodes gets its tokens slower than at 1/n of the pace that it would have alone.
That bounds a cycle, which is a decode step and the reading after it. A tenant with more sequences
than fit leaves some out of the step, in turn; they keep their memory and miss nothing else.

How long a step takes with so many sequences is learned. Where it takes hardly longer with many, as
on a GPU, none are left out. With one tenant, or without keys, nothing here applies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from gemserve.engine.sequence.sequence import Sequence

# Most seconds of a step, decode or reading, while another tenant's request may come at any time:
# it waits for the step's end.
SHARED_STEP_S = 0.03
# A tenant counts as present for so long after its last request has ended.
PRESENT_S = 10.0
# The least reading of each cycle, as a part of the least tenant's decode step, so that other
# tenants' prompts advance whatever a step of all tenants takes.
_LEAST_READING = 0.25
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """How many sequences of one tenant decode, and how many have prompts that are not read yet."""

    decoding: int
    unread: int


@dataclass(frozen=True, slots=True)
class Portion:
    """What one cycle may have.

    `rows`: most sequences of each tenant in the decode step. `reading_s`: seconds of reading
    prompts for each decode step; None: as for one tenant, because only one has work, or nobody
    decodes.
    """

    rows: int
    reading_s: float | None


class StepTimes:
    """Learns how many seconds a decode step takes with so many sequences.

    It keeps a smoothed point for each power of two, and draws lines between them.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # sequences and seconds

    def observe(self, num_rows: int, seconds: float) -> None:
        """Note that a step of `num_rows` > 0 sequences took `seconds`."""
        rows, known_s = self._points.get(num_rows.bit_length(), (num_rows, seconds))
        point = rows + _SMOOTHING * (num_rows - rows), known_s + _SMOOTHING * (seconds - known_s)
        self._points[num_rows.bit_length()] = point

    def seconds_of(self, num_rows: int) -> float:
        """Seconds of a step. Outside of what is known, each sequence takes equally long."""
        points = [self._points[bits] for bits in sorted(self._points)]
        if not points:
            return 0.0
        index = bisect_left(points, (num_rows, 0.0))
        if index in (0, len(points)):
            rows, seconds = points[min(index, len(points) - 1)]
            return seconds * num_rows / rows
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


def loads_of(sequences: Iterable[Sequence], is_decoding: Callable[[Sequence], bool]) -> list[Load]:
    """The load of each tenant that has sequences."""
    decoding: Counter[bytes] = Counter()
    unread: Counter[bytes] = Counter()
    for sequence in sequences:
        (decoding if is_decoding(sequence) else unread)[sequence.request.tenant] += 1
    return [Load(decoding[tenant], unread[tenant]) for tenant in decoding.keys() | unread.keys()]


def divide(
    loads: Items[Load], seconds_of: Callable[[int], float], reading_of: Callable[[Load], float]
) -> Portion:
    """What a cycle may have while several tenants have work, or may have some at any time.

    `seconds_of`: of a decode step, by its sequences. `reading_of`: how many times as long as its
    decode step one tenant alone, which decodes, would read its own prompts.
    """
    counts = [load.decoding for load in loads if load.decoding]
    if not counts:
        return Portion(1, None)
    num_tenants = len(loads)
    most_s = max(SHARED_STEP_S, num_tenants * seconds_of(1))
    most = _level(counts, most_s, seconds_of)
    if num_tenants == 1:
        return Portion(most, None)
    # the tenant that the bound is tightest for, and its reading
    _, least, reading = min(
        (seconds_of(rows) * (1 + reading_of(load)), rows, reading_of(load))
        for load in loads
        if (rows := min(load.decoding, most))
    )
    of_least_s = seconds_of(least)
    of_others_s = (num_tenants - 1) * of_least_s
    if not reading and any(load.unread for load in loads):
        of_others_s /= 2  # the other half is for their prompts
    rows = max(least, min(most, _level(counts, of_least_s + of_others_s, seconds_of)))
    taken_s = seconds_of(_num_rows(counts, rows))
    # a part of what it reads is the tenant's own, which is to have 1/n of its pace, too
    reading_s = max(reading * taken_s, num_tenants * of_least_s - taken_s)
    return Portion(rows, max(reading_s, _LEAST_READING * of_least_s))


def in_turn(decoding: Items[Sequence], rows: int, numbers: Iterator[int]) -> list[Sequence]:
    """At most `rows` sequences of each tenant, first those that have waited longest for a step.

    `numbers` grow from call to call. A sequence keeps its one as `decoded_at`.
    """
    of_tenants: Mapping[bytes, list[Sequence]] = defaultdict(list)
    for sequence in decoding:
        of_tenants[sequence.request.tenant].append(sequence)
    taken: set[int] = set()
    for some in of_tenants.values():
        some.sort(key=lambda s: s.decoded_at)
        for sequence in some[:rows]:
            sequence.decoded_at = next(numbers)
            taken.add(sequence.order)
    return [sequence for sequence in decoding if sequence.order in taken]


def _num_rows(counts: Iterable[int], most: int) -> int:
    return sum(min(count, most) for count in counts)


def _level(counts: Items[int], limit_s: float, seconds_of: Callable[[int], float]) -> int:
    """The most sequences of each tenant, at least 1, with which a step takes `limit_s` at most."""
    low, high = 1, max(counts)
    while low < high:
        middle = (low + high + 1) // 2
        if seconds_of(_num_rows(counts, middle)) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
