"""What the document cache tells about itself: counts for metrics, and what it has stored."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheCounts:
    """Since the start: passes, those that found something, and the tokens of both kinds.

    `evictions`: documents that gave way; `evicted_idle_s`: how long they had not been used, in all.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    evicted_idle_s: float = 0.0


@dataclass(slots=True)
class DiskCounts:
    """Since the start: passes that went on from files, tokens of these, and files written.

    `segments`: those that were read from files. `errors`: files that could not be read, written or
    copied.
    """

    hits: int = 0
    hit_tokens: int = 0
    segments: int = 0
    writes: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """What the cache has of a stored document: units, tokens, and whether some of it is pinned."""

    units: int
    num_tokens: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class CacheState:
    """The document cache at one moment. `oldest_s`: the time when what is oldest was last used."""

    counts: CacheCounts = field(default_factory=CacheCounts)
    disk: DiskCounts = field(default_factory=DiskCounts)
    memory_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes: int = 0
    oldest_s: float | None = None
