"""How far a sequence has come that reads its documents in windows. No torch.

Windows are read in groups, the same ones whatever is cached, so that what is computed of a window
and a question does not depend on the cache. In a group each window that is not cached is read
alone. Then what is asked is read behind all of them in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gemserve.cost import ModelShape, filter_units
from gemserve.engine.cache.document_cache import CachedDocument
from gemserve.engine.memory import Segment, Share
from gemserve.filter_plan import GROUP_TOKENS, Window, WindowPlan


@dataclass(frozen=True, slots=True)
class WindowRead:
    """A window in a chunk: its `index` in the plan.

    `text`: where the keys and values of its anchor and its tokens are, or get to if it is not
    cached. `asked`: the unit from which on those of what is asked go.
    """

    index: int
    text: Segment
    asked: int
    is_cached: bool


@dataclass(slots=True, eq=False)
class WindowPass:
    """The groups of a plan's windows, and what the next one has found in the cache.

    `found`: by index, the windows of the next group that are cached. They stay until the group is
    read, because the pass owns their spans, too. None: nobody has looked yet. `used`: windows that
    this pass has found or left, which do not give way to later windows of its own.
    """

    plan: WindowPlan
    layer: int
    groups: list[range] = field(init=False)
    next_group: int = 0
    found: dict[int, Share] | None = None
    used: set[CachedDocument] = field(default_factory=set)
    num_cached: int = 0  # windows

    def __post_init__(self) -> None:
        self.groups = list(_groups(self.plan))

    @property
    def group(self) -> range:
        """The indexes of the windows that are read next."""
        return self.groups[self.next_group]

    @property
    def left(self) -> range:
        """The indexes of all windows that are not read yet."""
        return range(self.group.start, len(self.plan.windows))

    @property
    def scratch_units(self) -> int:
        """The memory that it reads any group in."""
        return max(map(self._group_tokens, self.groups)) * filter_units(self.layer)

    def num_tokens(self, windows: range) -> int:
        """Tokens of the prompt in these windows."""
        return sum(map(self._length, windows))

    def reads(self, start: int) -> tuple[WindowRead, ...]:
        """What the next group reads, in memory from unit `start` on."""
        assert self.found is not None
        units, at, reads = filter_units(self.layer), start, []
        for index in self.group:
            share = self.found.get(index)
            size = len(self.plan.anchor) + self._length(index)
            text = Segment(at, size, size) if share is None else share.segment
            at += size * units if share is None else 0
            reads.append(WindowRead(index, text, at, is_cached=share is not None))
            at += len(self.plan.asked) * units
        return tuple(reads)

    def flops(self, shape: ModelShape, start: int, stop: int) -> float:
        """FLOPs of reading tokens start..stop−1 of all windows, if none is cached."""
        mean = max(1, round(self.plan.num_tokens / len(self.plan.windows)))
        size = len(self.plan.anchor) + mean
        of_window = shape.filter_chunk(0, size, self.layer)
        of_window += shape.filter_chunk(size, len(self.plan.asked), self.layer)
        return of_window * (stop - start) / mean

    def _length(self, index: int) -> int:
        return length(self.plan.windows[index])

    def _group_tokens(self, group: range) -> int:
        beside = len(self.plan.anchor) + len(self.plan.asked)
        return self.num_tokens(group) + len(group) * beside


def length(window: Window) -> int:
    """Tokens of the prompt in a window."""
    return window.stop - window.start


def _groups(plan: WindowPlan) -> Iterator[range]:
    """Windows one after the other, in groups of at most `GROUP_TOKENS` tokens."""
    first, count = 0, 0
    for index, window in enumerate(plan.windows):
        if index > first and count + length(window) > GROUP_TOKENS:
            yield range(first, index)
            first, count = index, 0
        count += length(window)
    yield range(first, len(plan.windows))
