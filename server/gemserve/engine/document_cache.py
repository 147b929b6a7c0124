"""What filter passes have computed of documents, kept for the next question. No torch.

The keys and values of the lower layers at a token depend on the tokens before it alone. So a prompt
that begins like an earlier one goes on where the two part, and selects anew: the answer is the one
that it would get without the cache.

The cache holds spans of the pool that all requests share, at most `limit` units. They are given up,
least recently used first, as soon as a request needs the memory.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.engine.memory import MemoryPool, Span

FEWEST_TOKENS = 256  # of a beginning that is worth keeping or taking over
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What else keys and values depend on.

    `tenant`: the server's own name for whoever asks; nobody's prompts are compared with another's.
    `adapter`: name and version, or None. `layer`: the filter layer, where the pass ended.
    """

    tenant: bytes
    adapter: tuple[str, str] | None
    layer: int


@dataclass(slots=True, eq=False)
class CachedDocument:
    """The memory of one filter pass over `tokens`, laid out as the pass has left it."""

    key: CacheKey
    tokens: Tokens
    span: Span
    last_used: int = 0


@dataclass(slots=True)
class CacheCounts:
    """Since the start: filter passes, those that found something, and the tokens of both kinds."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class DocumentCache:
    """Finds the longest common beginning of a prompt and an earlier one of the same key."""

    def __init__(self, pool: MemoryPool, limit: int) -> None:
        self.counts = CacheCounts()
        self.num_changes = 0  # what `find` has returned holds until this changes
        self._pool = pool
        self._limit = limit
        self._documents: list[CachedDocument] = []
        self._clock = 0
        self._used = 0

    @property
    def used(self) -> int:
        """Units that it holds."""
        return self._used

    def has_room(self, size: int) -> bool:
        """May a document of `size` units be kept, if others give way?"""
        return size <= self._limit

    def find(self, key: CacheKey, tokens: Tokens, limit: int) -> tuple[CachedDocument | None, int]:
        """The document with the most tokens in common, and how many, at most `limit`."""
        best, most = None, FEWEST_TOKENS - 1
        for document in self._documents:
            if document.key == key:
                count = min(limit, num_common(document.tokens, tokens))
                if count > most:
                    best, most = document, count
        return (None, 0) if best is None else (best, most)

    def use(self, document: CachedDocument | None, num_tokens: int, num_common: int) -> None:
        """Count a filter pass of `num_tokens`, of which `num_common` were found in `document`."""
        counts = self.counts
        counts.queries += 1
        counts.query_tokens += num_tokens
        if document is not None:
            counts.hits += 1
            counts.hit_tokens += num_common
            self._touch(document)

    def wants(self, key: CacheKey, tokens: Tokens, size: int) -> bool:
        """Whether a pass over `tokens`, in `size` units, adds enough to what is there."""
        if not self.has_room(size) or len(tokens) < FEWEST_TOKENS:
            return False
        document, count = self.find(key, tokens, len(tokens))
        if document is not None and len(tokens) - count < FEWEST_TOKENS:
            self._touch(document)
            return False
        return True

    def add(self, key: CacheKey, tokens: Tokens, span: Span) -> None:
        """Take over `span`. Documents that are the beginning of this one are dropped."""
        for other in list(self._documents):
            if other.key == key:
                rest = len(other.tokens) - num_common(other.tokens, tokens)
                if rest < FEWEST_TOKENS:
                    self._drop(other)
        while self._used + span.size > self._limit:
            self._evict_oldest()
        document = CachedDocument(key, tokens, span)
        self._touch(document)
        self._documents.append(document)
        self._used += span.size
        self.num_changes += 1

    def make_room(self, needed: int, spared: Collection[CachedDocument] = ()) -> None:
        """Evict until `needed` units of the pool are free, or nothing but `spared` is left."""
        while self._pool.free < needed and self._evict_oldest(spared):
            pass

    def check_integrity(self) -> None:
        """Prove that what is held is what is counted. Raises `AssertionError`."""
        held = sum(document.span.size for document in self._documents)
        assert held == self._used <= self._limit, (held, self._used, self._limit)

    def _evict_oldest(self, spared: Collection[CachedDocument] = ()) -> bool:
        able = [document for document in self._documents if document not in spared]
        if not able:
            return False
        self._drop(min(able, key=lambda document: document.last_used))
        self.counts.evictions += 1
        return True

    def _drop(self, document: CachedDocument) -> None:
        self._documents.remove(document)
        self._used -= document.span.size
        self._pool.release(document.span)
        self.num_changes += 1

    def _touch(self, document: CachedDocument) -> None:
        self._clock += 1
        document.last_used = self._clock


def as_tokens(ids: Ids[int]) -> Tokens:
    return np.asarray(ids, dtype=np.int64)


def num_common(one: Tokens, other: Tokens) -> int:
    """How many tokens two prompts have in common from their beginning on."""
    count, start, size = min(len(one), len(other)), 0, FEWEST_TOKENS
    while start < count:  # in growing parts: most prompts part early
        stop = min(count, start + size)
        is_different = one[start:stop] != other[start:stop]
        first = int(is_different.argmax())
        if is_different[first]:
            return start + first
        start, size = stop, 4 * size
    return count
