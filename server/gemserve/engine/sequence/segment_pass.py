"""How far a sequence has come that reads its documents in segments. No torch.

Segments are read in groups, the same ones whatever is cached, so that what is computed of a segment
and a question does not depend on the cache. In a group each segment that is not cached is read
alone. Then what is asked is read behind all of them in one pass. So a whole group may be read by
another engine, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gemserve.contract.events import SegmentsRead
from gemserve.contract.filter_plan import SegmentPlan
from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import CachedDocument
from gemserve.engine.memory import MemoryShare, Stretch


@dataclass(frozen=True, slots=True)
class SegmentRead:
    """A segment in a chunk: its `index` in the plan.

    `text`: where the keys and values of its anchor and its tokens are, or get to if it is not
    cached. `asked`: the unit from which on those of what is asked go.
    """

    index: int
    text: Stretch
    asked: int
    is_cached: bool


@dataclass(slots=True, eq=False)
class SegmentPass:
    """The groups of a plan's segments, and what the next one has found in the cache.

    `token_units`: units of memory of each token.
    `lent`: the numbers of the groups that others read, and `arrived`: what came of these. `found`:
    by index, the segments of the next group that are cached. They stay until the group is read,
    because the pass owns their spans, too. None: nobody has looked yet. `used`: segments that this
    pass has found or left, which do not give way to later segments of its own.
    """

    plan: SegmentPlan
    layer: int
    token_units: int
    groups: list[range] = field(init=False)
    num_tokens: int = field(init=False)  # of the prompt, in all segments
    scratch_units: int = field(init=False)  # the memory that it reads any group in
    lent: set[int] = field(default_factory=set)
    arrived: dict[int, SegmentsRead] = field(default_factory=dict)
    found: dict[int, MemoryShare] | None = None
    used: set[CachedDocument] = field(default_factory=set)
    num_cached: int = 0  # segments
    # the names that the cache lacks, and the tokens that it has, at one of its changes
    looked: tuple[int, frozenset[bytes], int] | None = None
    _unread: list[int] = field(init=False)
    _begun: int | None = None

    def __post_init__(self) -> None:
        self.groups = self.plan.groups
        self._unread = list(range(len(self.groups)))
        self.num_tokens = self.plan.num_tokens
        self.scratch_units = max(map(self._group_tokens, self.groups)) * self.token_units

    @property
    def next_group(self) -> int:
        """The number of the group that is read next. If there is none now, how many there are."""
        if self._begun is not None:
            return self._begun
        ready = (n for n in self._unread if n not in self.lent or n in self.arrived)
        return next(ready, len(self.groups))

    @property
    def group(self) -> range:
        """The indexes of the segments that are read next."""
        return self.groups[self.next_group]

    @property
    def is_awaiting(self) -> bool:
        """Are all groups that it has not read lent, and has none arrived?"""
        return bool(self._unread) and self.next_group == len(self.groups)

    @property
    def left(self) -> tuple[int, ...]:
        """The indexes of all segments that it will read itself, and has not read yet."""
        own = (number for number in self._unread if number not in self.lent)
        return tuple(index for number in own for index in self.groups[number])

    def begin_group(self) -> None:
        """Read the next group until `end_group`, whatever arrives meanwhile."""
        self._begun = self.next_group

    def end_group(self) -> None:
        """The group that has begun is read."""
        assert self._begun is not None
        self._unread.remove(self._begun)
        self._begun = None

    def num_tokens_of(self, segments: Iterable[int]) -> int:
        """Tokens of the prompt in these segments."""
        return sum(self.plan.segments[index].num_tokens for index in segments)

    def reads(self, start: int) -> tuple[SegmentRead, ...]:
        """What the next group reads, in memory from unit `start` on."""
        assert self.found is not None
        units, at, reads = self.token_units, start, []
        for index in self.group:
            share = self.found.get(index)
            size = len(self.plan.anchor) + self.plan.segments[index].num_tokens
            text = Stretch(at, size, size) if share is None else share.stretch
            at += size * units if share is None else 0
            reads.append(SegmentRead(index, text, at, is_cached=share is not None))
            at += len(self.plan.asked) * units
        return tuple(reads)

    def flops(self, shape: ModelShape, start: int, stop: int) -> float:
        """FLOPs of reading tokens start..stop−1 of all segments, if none is cached."""
        mean = max(1, round(self.num_tokens / len(self.plan.segments)))
        size = len(self.plan.anchor) + mean
        of_segment = shape.filter_chunk(0, size, self.layer)
        of_segment += shape.filter_chunk(size, len(self.plan.asked), self.layer)
        return of_segment * (stop - start) / mean

    def _group_tokens(self, group: range) -> int:
        beside = len(self.plan.anchor) + len(self.plan.asked)
        return self.num_tokens_of(group) + len(group) * beside
