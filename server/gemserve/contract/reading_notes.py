"""What is noted of a request for whoever relays it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Something that the document cache holds. Its thread sets `is_dropped` once; any may read."""

    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a prompt that the document cache holds: the shares `start` to `stop` of it."""

    entry: CacheEntry
    start: float
    stop: float


@dataclass(slots=True, eq=False)
class ReadingNotes:
    """What is noted about one request for whoever relays it.

    `is_queued`: the engine has it. `held`: the engine's thread appends to it whenever the document
    cache has stored a part of the prompt, or has found it there.
    """

    is_queued: bool = False
    held: list[HeldPart] = field(default_factory=list)
