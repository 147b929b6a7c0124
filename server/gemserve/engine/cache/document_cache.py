"""What passes have computed of prompts, kept for the next question about a document. No torch.

The keys and values of a token depend on the tokens before it alone. So a prompt that begins like an
earlier one goes on where the two part, and a filter selects anew: the answer is the one that it
would get without the cache. A filter pass leaves its lower layers, a prompt that is read whole all.

The cache holds spans of the pool that all requests share, at most `limit` units. They are given up
when a request needs the memory, first the least recently used of the tenant that holds most.
Pinned documents stay, at most half of `limit`, unless a request does not fit in beside them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from gemserve.engine.cache.common_tokens import Tokens, num_common
from gemserve.engine.cache.shares import Coming, Spared, first_to_go
from gemserve.engine.cache.state import CacheCounts, StoredDocument
from gemserve.engine.memory import MemoryPool, Span

FEWEST_TOKENS = 256  # of a beginning that is worth keeping or taking over
PINNED_SHARE = 0.5  # of the cache that pinned documents may hold
# A document gives way if that spares the pool from moving this many times its size. In full memory
# the gaps are small and many, and every request would move most of the pool.
MOST_MOVED = 4
MOST_FORGOTTEN = 10_000  # ids that are remembered, for requests that were on their way


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What else keys and values depend on.

    `tenant`: the server's own name for whoever asks; nobody's prompts are compared with another's.
    `adapter`: name and version, or None. `layer`: the filter layer, where the pass ended. None: the
    prompt was read whole, by all layers.
    """

    tenant: bytes
    adapter: tuple[str, str] | None
    layer: int | None

    def token_units(self, num_layers: int) -> int:
        """Units of one token: K and V of each layer, but only the keys of a filter layer."""
        return 2 * num_layers if self.layer is None else 2 * self.layer + 1


@dataclass(slots=True, eq=False)
class CachedDocument:
    """The memory of one pass over `tokens`, with room for these and no more.

    `ids`: those of the stored documents that `tokens` contain; see `Request.documents`. `used_s`:
    when it was last used (`time.monotonic()`).
    """

    key: CacheKey
    tokens: Tokens
    span: Span
    ids: frozenset[str] = frozenset()
    is_pinned: bool = False
    is_saved: bool = False  # on the disk, as far as it should be
    is_dropped: bool = False
    last_used: int = 0
    used_s: float = 0.0


class DocumentCache:
    """Finds the longest common beginning of a prompt and an earlier one of the same key."""

    def __init__(self, pool: MemoryPool, limit: int) -> None:
        self.counts = CacheCounts()
        self.num_changes = 0  # what `find` and `stored` have returned holds until this changes
        self._pool = pool
        self._limit = limit
        self._documents: list[CachedDocument] = []
        self._forgotten: dict[str, None] = {}  # ids, oldest first
        self._clock = 0
        self._used = 0
        self._pinned = 0

    @property
    def used(self) -> int:
        """Units that it holds."""
        return self._used

    @property
    def documents(self) -> Ids[CachedDocument]:
        return self._documents

    @property
    def pinned(self) -> int:
        """Units of pinned documents."""
        return self._pinned

    @property
    def pin_limit(self) -> int:
        """The most units that pinned documents may hold."""
        return int(PINNED_SHARE * self._limit)

    @property
    def oldest_s(self) -> float | None:
        """When the document that was used longest ago was used; None: it is empty."""
        return min((document.used_s for document in self._documents), default=None)

    @property
    def is_on(self) -> bool:
        """May it hold anything? If not, no prompt takes over what another has computed."""
        return self._limit > 0

    def has_room(self, size: int) -> bool:
        """May a document of `size` units be kept, if others give way?"""
        return size <= self._limit - self.pinned

    def available(self, size: int, spared: Spared = ()) -> int:
        """Units that a request for `size` can have now, if all documents but `spared` give way."""
        gives_way = self._gives_way(size)
        able = self._used if gives_way else self._used - self._pinned
        kept = (d.span.size for d in spared if gives_way or not d.is_pinned)
        return self._pool.free + able - sum(kept)

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
        """Count a pass of `num_tokens`, of which `num_common` were found.

        `document`: where; None: nowhere, or in the memory of a running request.
        """
        counts = self.counts
        counts.queries += 1
        counts.query_tokens += num_tokens
        counts.hits += num_common > 0
        counts.hit_tokens += num_common
        if document is not None:
            self._touch(document)

    def wants(
        self,
        key: CacheKey,
        tokens: Tokens,
        size: int,
        ids: Collection[str] = (),
        is_pinned: bool = False,
    ) -> bool:
        """Whether a pass over `tokens`, in `size` units, adds enough to what is there.

        If it does not, what is there is also that of `ids`, and is pinned if this one should be.
        """
        if self.has_forgotten(ids) or len(tokens) < FEWEST_TOKENS:
            return False
        document, count = self.find(key, tokens, len(tokens))
        if document is not None and len(tokens) - count < FEWEST_TOKENS:
            self._touch(document)
            self._mark(document, ids, is_pinned)
            return False
        return self.has_room(size)

    def add(
        self,
        key: CacheKey,
        tokens: Tokens,
        span: Span,
        ids: Collection[str] = (),
        is_pinned: bool = False,
    ) -> None:
        """Take over `span`. Documents that are the beginning of this one are dropped.

        A pinned one is dropped only for another that should be pinned.
        """
        all_ids = set(ids)
        for other in list(self._documents):
            if other.key == key:
                rest = len(other.tokens) - num_common(other.tokens, tokens)
                if rest < FEWEST_TOKENS:
                    all_ids |= other.ids
                    if is_pinned or not other.is_pinned:
                        self._drop(other)
        while self._used + span.size > self._limit:
            was_evicted = self._evict_oldest(coming=(key.tenant, span.size))
            assert was_evicted, "a document that has no room must not be added"
        document = CachedDocument(key, tokens, span)
        self._touch(document)
        self._documents.append(document)
        self._used += span.size
        self.num_changes += 1
        self._mark(document, all_ids, is_pinned)

    def forget(self, ids: Collection[str]) -> None:
        """Drop everything that contains these documents; what contains them is not added again."""
        self._forgotten |= dict.fromkeys(ids)
        while len(self._forgotten) > MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        for document in list(self._documents):
            if not document.ids.isdisjoint(ids):
                self._drop(document)

    def has_forgotten(self, ids: Collection[str]) -> bool:
        """Must nothing be kept or taken over of a prompt that contains these documents?"""
        return any(i in self._forgotten for i in ids)

    def stored(self) -> dict[str, StoredDocument]:
        """What is held of each stored document."""
        held: dict[str, StoredDocument] = {}
        for document in self._documents:
            for name in document.ids:
                before = held.get(name, StoredDocument(0, 0, False))
                held[name] = StoredDocument(
                    before.units + document.span.size,
                    before.num_tokens + len(document.tokens),
                    before.is_pinned or document.is_pinned,
                )
        return held

    def make_room(self, needed: int, spared: Spared = (), tenant: bytes = b"") -> None:
        """Evict until `needed` units of the pool are free for `tenant`, or only `spared` is left.

        Pinned documents are evicted last, and only if the request does not fit beside them.
        """
        coming = (tenant, needed)
        while self._pool.free < needed and self._evict_oldest(spared, coming=coming):
            pass
        if self._gives_way(needed):
            while self._pool.free < needed and self._evict_oldest(spared, True, coming):
                pass

    def spare_moves(self, needed: int, spared: Spared = (), tenant: bytes = b"") -> None:
        """Evict while the pool would move too much to have `needed` free units in one place."""
        while self._pool.free >= needed:
            oldest = self._oldest(spared, coming=(tenant, needed))
            if oldest is None or self._pool.num_moved(needed) <= MOST_MOVED * oldest.span.size:
                return
            self._evict_oldest(spared, coming=(tenant, needed))

    def check_integrity(self) -> None:
        """Prove that what is held is what is counted. Raises `AssertionError`."""
        held = sum(document.span.size for document in self._documents)
        pinned = sum(document.span.size for document in self._documents if document.is_pinned)
        assert pinned == self._pinned, (pinned, self._pinned)
        assert held == self._used <= self._limit, (held, self._used, self._limit)
        assert self.pinned <= self.pin_limit, (self.pinned, self.pin_limit)
        for document in self._documents:
            assert document.span.is_private or not document.ids
            assert document.ids.isdisjoint(self._forgotten)

    def _gives_way(self, size: int) -> bool:
        """Do pinned documents give way to a request for `size`, which could not run beside them?"""
        return size > self._pool.capacity - self.pinned

    def _evict_oldest(
        self, spared: Spared = (), is_pinned: bool = False, coming: Coming = None
    ) -> bool:
        oldest = self._oldest(spared, is_pinned, coming)
        if oldest is None:
            return False
        self._drop(oldest)
        self.counts.evictions += 1
        self.counts.evicted_idle_s += time.monotonic() - oldest.used_s
        return True

    def _oldest(
        self, spared: Spared = (), is_pinned: bool = False, coming: Coming = None
    ) -> CachedDocument | None:
        able = [d for d in self._documents if d not in spared and d.is_pinned == is_pinned]
        return first_to_go(self._documents, able, coming)

    def _mark(self, document: CachedDocument, ids: Collection[str], is_pinned: bool) -> None:
        """Note the stored documents that it contains, and pin it if pins have room for it."""
        if not document.ids.issuperset(ids):
            document.ids |= frozenset(ids)
            document.span.is_private, document.is_saved = True, False
            self.num_changes += 1
        is_fitting = self.pinned + document.span.size <= self.pin_limit
        if is_pinned and not document.is_pinned and is_fitting:
            document.is_pinned = True
            self._pinned += document.span.size
            self.num_changes += 1

    def _drop(self, document: CachedDocument) -> None:
        document.is_dropped = True
        self._documents.remove(document)
        self._used -= document.span.size
        self._pinned -= document.span.size if document.is_pinned else 0
        self._pool.release(document.span)
        self.num_changes += 1

    def _touch(self, document: CachedDocument) -> None:
        self._clock += 1
        document.last_used = self._clock
        document.used_s = time.monotonic()
