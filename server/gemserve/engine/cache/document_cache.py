"""What passes have computed of prompts, kept for the next question about a document. No torch.

The keys and values of a token depend on the tokens before it alone. So a prompt that begins like an
earlier one goes on where the two part, and a filter selects anew: the answer is the one that it
would get without the cache. A filter pass leaves its lower layers, a prompt that is read whole all.

The cache is one of the owners of spans of the pool: of at most `limit` units. A filter pass that
begins like a cached document owns that document's spans, too, as long as it runs, and what it adds
becomes a document that begins in the same spans. A document is given up when a request needs the
memory, first the least recently used of the tenant that holds most: if the one that was used
longest ago went, whoever it is of, a tenant could flood the cache, and nobody else's documents
would be found again. Pinned documents stay, at most half of `limit`, unless a request does not fit
in beside them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from gemserve.contract.reading_notes import CacheEntry
from gemserve.cost import filter_units
from gemserve.engine.cache.common_tokens import Tokens, num_common
from gemserve.engine.cache.state import CacheCounts, StoredDocument
from gemserve.engine.memory import MemoryPool, MemoryShare, Span
from gemserve.kv_layout import KVLayout

FEWEST_TOKENS = 256  # of a beginning that is worth keeping or taking over
PINNED_SHARE = 0.5  # of the cache that pinned documents may hold
# A document gives way if without it the pool moves more than so many times its size less. What is
# moved is copied, which takes a fraction of the time in which it was read.
MOST_MOVED = 2
MOST_FORGOTTEN = 10_000  # ids that are remembered, for requests that were on their way


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What else keys and values depend on.

    `tenant`: the server's own name for whoever asks; nobody's prompts are compared with another's.
    `salt`: what else a request says that its prompt must have in common with others.
    `adapter`: name and version, or None. `layer`: the filter layer, where the pass ended. None: the
    prompt was read whole, by all layers.
    """

    tenant: bytes
    adapter: tuple[str, str] | None
    layer: int | None
    salt: str = ""

    def token_units(self, layout: KVLayout) -> int:
        """Units of one token, but those in layers with a window if all layers have read it.

        They are K and V of each layer, but only the keys of a filter layer.
        """
        return 2 * layout.growing if self.layer is None else filter_units(self.layer)


@dataclass(slots=True, eq=False, repr=False)
class CachedDocument:
    """What one pass or several have computed of `tokens`, which are in `shares` in their order.

    `ids`: those of the stored documents that `tokens` contain; see `Request.documents`. `used_s`:
    when it was last used (`time.monotonic()`).
    """

    key: CacheKey
    tokens: Tokens
    shares: tuple[MemoryShare, ...]
    ids: frozenset[str] = frozenset()
    is_pinned: bool = False
    is_saved: bool = False  # on the disk, as far as it should be
    entry: CacheEntry = field(default_factory=CacheEntry)  # outlives the document
    name: bytes | None = None  # of a segment
    num_stable: int = 0  # of a part that was chosen: see `add`
    added_at: int = 0  # the number of the cache's changes
    last_used: int = 0
    used_s: float = 0.0

    @property
    def is_dropped(self) -> bool:
        return self.entry.is_dropped

    @property
    def spans(self) -> list[Span]:
        return [share.span for share in self.shares]

    def usable(self, count: int) -> int:
        """The most of its first `count` tokens behind which another pass may go on."""
        room = self.shares[-1].room
        return count if room is None else room.usable(count)

    @property
    def units(self) -> int:
        """Units of all its spans, some of which other documents may own, too."""
        return sum(span.size for span in self.spans)


class _Holdings:
    """The spans that some documents own, and how many of these documents own each.

    A span's owners are of one tenant. `units`: of all of them, and of each tenant.
    """

    def __init__(self) -> None:
        self.units = 0  # each span counts once
        self.units_of: Counter[bytes] = Counter()
        self._spans: dict[int, tuple[Span, int]] = {}

    def count(self, span: Span) -> int:
        return self._spans[id(span)][1] if id(span) in self._spans else 0

    def add(self, document: CachedDocument) -> None:
        for span in document.spans:
            count = self.count(span)
            self._spans[id(span)] = span, count + 1
            if not count:
                self.units += span.size
                self.units_of[document.key.tenant] += span.size

    def remove(self, document: CachedDocument) -> None:
        for span in document.spans:
            count = self.count(span) - 1
            self._spans[id(span)] = span, count
            if not count:
                del self._spans[id(span)]
                self.units -= span.size
                self.units_of[document.key.tenant] -= span.size
        if not self.units_of[document.key.tenant]:
            del self.units_of[document.key.tenant]

    @property
    def spans(self) -> list[Span]:
        return [span for span, _ in self._spans.values()]

    @property
    def alone(self) -> int:
        """Units of the spans that nobody else owns."""
        return sum(span.size for span, count in self._spans.values() if span.references == count)

    def owns_alone(self, span: Span) -> bool:
        """Does nobody else own one of its spans?"""
        return span.references == self.count(span)

    def only_of(self, documents: Iterable[CachedDocument]) -> int:
        """Units of their spans that no other document owns."""
        owners = Counter(id(span) for document in documents for span in document.spans)
        held = self._spans
        return sum(held[at][0].size for at, count in owners.items() if held[at][1] == count)

    def without(self, kept: Iterable[CachedDocument]) -> list[Span]:
        """The spans that no document of `kept` and nobody else owns."""
        owned = {id(span) for document in kept for span in document.spans}
        spans = self._spans.values()
        return [s for s, count in spans if id(s) not in owned and s.references == count]


class DocumentCache:
    """Finds the longest common beginning of a prompt and an earlier one of the same key."""

    def __init__(self, pool: MemoryPool, limit: int) -> None:
        self.counts = CacheCounts()
        self.num_changes = 0  # what `find` and `stored` have returned holds until this changes
        self._pool = pool
        self._limit = limit
        self._documents: dict[CachedDocument, None] = {}
        # of each tenant, pinned or not; what was used last is the last one
        self._by_use: dict[tuple[bytes, bool], dict[CachedDocument, None]] = {}
        self._segments: dict[tuple[CacheKey, bytes], CachedDocument] = {}
        self._by_beginning: dict[tuple[CacheKey, bytes], dict[CachedDocument, None]] = {}
        self._held, self._held_pinned = _Holdings(), _Holdings()
        self._having: dict[str, dict[CachedDocument, None]] = {}  # by id
        self._stored: dict[str, StoredDocument] = {}
        self._changed_ids: set[str] = set()  # since `stored` was called
        self._forgotten: dict[str, None] = {}  # ids, oldest first
        self._clock = 0
        # units that nobody else owns, as long as neither documents nor owners of spans change
        self._freeable, self._freeable_at = 0, (-1, -1)
        self._refused_place: tuple[int, ...] = ()  # what `make_place` was last asked in vain

    @property
    def used(self) -> int:
        """Units of the spans that it owns, alone or with others."""
        return self._held.units

    @property
    def unused(self) -> int:
        """Units that it may hold and does not."""
        return self._limit - self.used

    @property
    def documents(self) -> Sequence[CachedDocument]:
        return [*self._documents]

    @property
    def pinned(self) -> int:
        """Units of pinned documents."""
        return self._held_pinned.units

    @property
    def pin_limit(self) -> int:
        """The most units that pinned documents may hold."""
        return int(PINNED_SHARE * self._limit)

    @property
    def oldest_s(self) -> float | None:
        """When the document that was used longest ago was used; None: it is empty."""
        first = (next(iter(in_order)).used_s for in_order in self._by_use.values())
        return min(first, default=None)

    @property
    def is_on(self) -> bool:
        """May it hold anything? If not, no prompt takes over what another has computed."""
        return self._limit > 0

    def has_room(self, size: int) -> bool:
        """May `size` units more be kept, if others give way?"""
        return size <= self._limit - self.pinned

    def available(self, size: int, spared: Collection[CachedDocument] = ()) -> int:
        """Units that a request for `size` can have now, if all documents but `spared` give way.

        What requests own as well stays.
        """
        now = self.num_changes, self._pool.num_changes
        if self._freeable_at != now:
            self._freeable, self._freeable_at = self._held.alone, now
        stays = {id(span): span for document in spared for span in document.spans}
        stays |= {id(span): span for span in self.staying(size)}
        kept = sum(span.size for span in stays.values() if self._held.owns_alone(span))
        return self._pool.free + self._freeable - kept

    def staying(self, size: int) -> list[Span]:
        """The spans of pinned documents, if they do not give way to a request for `size`."""
        return [] if self._gives_way(size) else self._held_pinned.spans

    def find(
        self,
        key: CacheKey,
        tokens: Tokens,
        limit: int,
        earlier: tuple[int, CachedDocument | None, int] | None = None,
    ) -> tuple[CachedDocument | None, int]:
        """The document with the most tokens in common, and how many, at most `limit`.

        `earlier`: what it has returned for the same before, behind the number of changes then.
        """
        best, most, since = None, FEWEST_TOKENS - 1, -1
        if earlier is not None and (earlier[1] is None or not earlier[1].is_dropped):
            since, best = earlier[:2]
            most = most if best is None else earlier[2]
        for document in reversed(self._by_beginning.get((key, _beginning(tokens)), {})):
            if document.added_at <= since:
                break
            count = document.usable(min(limit, num_common(document.tokens, tokens)))
            if count > most:
                best, most = document, count
        return (None, 0) if best is None else (best, most)

    def find_segment(self, key: CacheKey, name: bytes) -> CachedDocument | None:
        """The segment of this name: see `filter_plan.Segment`."""
        return self._segments.get((key, name))

    def use_segment(
        self, document: CachedDocument, ids: Collection[str] = (), is_pinned: bool = False
    ) -> None:
        """Note that a segment was found for a request; see `wants`."""
        self._touch(document)
        if not self.has_forgotten(ids):
            self._mark(document, ids, is_pinned)

    def room_for_segment(
        self, size: int, spared: Collection[CachedDocument], tenant: bytes
    ) -> Span | None:
        """Memory for a segment, for which others but `spared` give way; None: there is none."""
        coming = (tenant, size)
        while self._held.units + size > self._limit or self._pool.free < size:
            if not self._evict_oldest(spared, coming=coming):
                return None
        span = self._pool.allocate(size)
        while span is None and self._evict_oldest(spared, coming=coming):
            span = self._pool.allocate(size)
        return span

    def add_segment(
        self,
        key: CacheKey,
        name: bytes,
        tokens: Tokens,
        share: MemoryShare,
        ids: Collection[str] = (),
        is_pinned: bool = False,
        *,
        is_complete: bool = True,
    ) -> CachedDocument:
        """Take over a segment's share, for which `room_for_segment` has made room.

        One that is not complete is not found before `complete_segment`, but may give way.
        """
        assert (key, name) not in self._segments
        share.span.is_private |= bool(ids)
        share.span.ids |= frozenset(ids)
        document = CachedDocument(key, tokens, (share,), frozenset(ids), name=name)
        self._documents[document] = None
        self._note_ids(document)
        self._held.add(document)
        self._touch(document)
        self.num_changes += 1
        self._mark(document, (), is_pinned)
        if is_complete:
            self.complete_segment(document)
        return document

    def complete_segment(self, document: CachedDocument) -> None:
        """Let a segment be found, all of whose keys and values are there now."""
        assert document.name is not None
        assert not document.is_dropped
        if self._segments.setdefault((document.key, document.name), document) is not document:
            self._drop(document)  # another pass was faster
        self.num_changes += 1

    def drop_segment(self, document: CachedDocument) -> None:
        """Give up a segment. Idempotent."""
        if not document.is_dropped:
            self._drop(document)

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
        """Whether a pass over `tokens`, which computed `size` units, adds enough to what is there.

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
        shares: tuple[MemoryShare, ...],
        ids: Collection[str] = (),
        is_pinned: bool = False,
        *,
        num_stable: int = 0,
    ) -> None:
        """Take over the caller's `shares`. If it has room, what it begins with is dropped.

        A pinned one is dropped only for another that should be pinned. `num_stable`: the tokens are
        a part that was chosen of a prompt, and so many of them begin every choice. They take the
        place of earlier choices that begin with the same, because only the beginning is likely to
        be found again.
        """
        all_ids = frozenset(ids)
        alike = list(self._by_beginning.get((key, _beginning(tokens)), ()))
        beginnings = [d for d in alike if _is_beginning(d, tokens)]
        if num_stable:
            beginnings += [
                d
                for d in (alike if num_stable >= FEWEST_TOKENS else self._documents)
                if d.key == key
                and d.num_stable == num_stable
                and d not in beginnings
                and num_common(d.tokens, tokens) >= num_stable
            ]
        for beginning in beginnings:
            all_ids |= beginning.ids
        for share in shares:
            share.span.is_private |= bool(all_ids)
        shares[-1].span.ids |= all_ids  # the others' tokens were there before
        document = CachedDocument(key, tokens, shares, all_ids, num_stable=num_stable)
        self._documents[document] = None
        self._note_ids(document)
        self._by_beginning.setdefault((key, _beginning(tokens)), {})[document] = None
        self._held.add(document)
        self._touch(document)
        self.num_changes += 1
        document.added_at = self.num_changes
        going = [each for each in beginnings if is_pinned or not each.is_pinned]
        while self._held.units - self._held.only_of(going) > self._limit:
            if not self._evict_oldest([document, *going]):
                # requests own the rest of it, which counts here, too
                self._drop(document)
                for each in going:
                    self._mark(each, ids, is_pinned=False)
                return
        for each in going:
            self._drop(each)
        self._mark(document, (), is_pinned)

    def forget(self, ids: Collection[str]) -> None:
        """Drop everything that contains these documents; what contains them is not added again."""
        self._forgotten |= dict.fromkeys(ids)
        while len(self._forgotten) > MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        for document in list(self._documents):
            # one that only begins like it keeps all of its span from becoming free
            is_in = any(not span.ids.isdisjoint(ids) for span in document.spans)
            if is_in or not document.ids.isdisjoint(ids):
                self._drop(document)

    def has_forgotten(self, ids: Collection[str]) -> bool:
        """Must nothing be kept or taken over of a prompt that contains these documents?"""
        return any(i in self._forgotten for i in ids)

    def stored(self) -> dict[str, StoredDocument]:
        """What is held of each stored document. Nobody changes what was returned."""
        if self._changed_ids:
            stored = dict(self._stored)
            for name in self._changed_ids:
                stored.pop(name, None)
                if having := self._having.get(name):
                    stored[name] = StoredDocument(
                        sum(document.units for document in having),
                        sum(len(document.tokens) for document in having),
                        any(document.is_pinned for document in having),
                    )
            self._stored, self._changed_ids = stored, set()
        return self._stored

    def make_room(
        self, needed: int, spared: Collection[CachedDocument] = (), tenant: bytes = b""
    ) -> None:
        """Evict until `needed` units of the pool are free for `tenant`, or only `spared` is left.

        Pinned documents are evicted last, and only if the request does not fit beside them.
        """
        coming = (tenant, needed)
        while self._pool.free < needed and self._evict_oldest(spared, coming=coming):
            pass
        if self._gives_way(needed):
            while self._pool.free < needed and self._evict_oldest(spared, True, coming):
                pass

    def spare_moves(
        self, needed: int, spared: Collection[CachedDocument] = (), tenant: bytes = b""
    ) -> None:
        """Evict while the pool would move too much to have `needed` free units in one place."""
        while self._pool.free >= needed:
            oldest = self._oldest(spared, coming=(tenant, needed))
            if oldest is None:
                return
            own = self._held.without(d for d in self._documents if d is not oldest)
            spared_moves = self._pool.num_moved(needed) - self._pool.num_moved(needed, without=own)
            if spared_moves <= MOST_MOVED * sum(span.size for span in own):
                return
            self._evict_oldest(spared, coming=(tenant, needed))

    def make_place(
        self,
        needed: int,
        fixed: Collection[Span],
        most: int,
        spared: Collection[CachedDocument] = (),
        tenant: bytes = b"",
    ) -> bool:
        """Evict until the pool can move `needed` free units together around `fixed` spans.

        The least recently used go, `most` units of them. False, and none has gone, if that is not
        enough.
        """
        pool, held = self._pool, self._held
        asked = needed, most, self.num_changes, pool.num_changes, *map(id, [*fixed, *spared])
        if asked == self._refused_place:
            return False
        going: list[CachedDocument] = []
        left, counted = most, set[int]()
        for document in self._in_order(spared, coming=(tenant, needed)):
            spans = {id(span): span.size for span in document.spans if id(span) not in counted}
            if sum(spans.values()) <= left:
                left -= sum(spans.values())
                counted |= spans.keys()
                going.append(document)

        def is_enough(count: int) -> bool:
            gone = set(going[:count])
            freed = held.without(d for d in self._documents if d not in gone)
            return pool.has_place(needed, fixed, without=freed)

        if not is_enough(len(going)):
            self._refused_place = asked
            return False
        for document in going[: bisect_left(range(len(going)), True, key=is_enough)]:
            self._evict(document)
        return True

    def check_integrity(self) -> None:
        """Prove that what is held is what is counted. Raises `AssertionError`."""
        for held, documents in (
            (self._held, self.documents),
            (self._held_pinned, [d for d in self._documents if d.is_pinned]),
        ):
            counts = Counter(id(span) for document in documents for span in document.spans)
            units = {id(span): span.size for document in documents for span in document.spans}
            assert sum(units.values()) == held.units, (units, held.units)
            assert counts == {at: count for at, (_, count) in held._spans.items()}
            of_tenants = {id(s): (d.key.tenant, s.size) for d in documents for s in d.spans}
            for tenant in {tenant for tenant, _ in of_tenants.values()}:
                sizes = [size for owner, size in of_tenants.values() if owner == tenant]
                assert held.units_of[tenant] == sum(sizes), tenant
        for (tenant, is_pinned), in_order in self._by_use.items():
            assert all((d.key.tenant, d.is_pinned) == (tenant, is_pinned) for d in in_order)
            uses = [document.last_used for document in in_order]
            assert uses == sorted(uses)
        assert {d for each in self._by_use.values() for d in each} == self._documents.keys()
        found = {d for each in self._by_beginning.values() for d in each}
        assert found == {d for d in self._documents if d.name is None}
        named = {(name, d) for name, having in self._having.items() for d in having}
        assert named == {(name, d) for d in self._documents for name in d.ids}
        assert self.used <= self._limit, (self.used, self._limit)
        assert self.pinned <= self.pin_limit, (self.pinned, self.pin_limit)
        for document in self._documents:
            assert sum(share.count for share in document.shares) == len(document.tokens)
            assert all(span.is_private for span in document.spans) or not document.ids
            assert all(span.ids.isdisjoint(self._forgotten) for span in document.spans)
            assert document.ids.isdisjoint(self._forgotten)

    def _gives_way(self, size: int) -> bool:
        """Do pinned documents give way to a request for `size`, which could not run beside them?"""
        return size > self._pool.capacity - self.pinned

    def _evict_oldest(
        self,
        spared: Collection[CachedDocument] = (),
        is_pinned: bool = False,
        coming: tuple[bytes, int] | None = None,
    ) -> bool:
        oldest = self._oldest(spared, is_pinned, coming)
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def _evict(self, document: CachedDocument) -> None:
        self._drop(document)
        self.counts.evictions += 1
        self.counts.evicted_idle_s += time.monotonic() - document.used_s

    def _oldest(
        self,
        spared: Collection[CachedDocument] = (),
        is_pinned: bool = False,
        coming: tuple[bytes, int] | None = None,
    ) -> CachedDocument | None:
        """The document that gives way next, of those that only the cache owns some memory of."""
        return next(self._in_order(spared, is_pinned, coming), None)

    def _in_order(
        self,
        spared: Collection[CachedDocument] = (),
        is_pinned: bool = False,
        coming: tuple[bytes, int] | None = None,
    ) -> Iterator[CachedDocument]:
        """Those documents, in the order in which they give way, as if each one did."""
        held = Counter(self._held.units_of)
        if coming is not None:
            held[coming[0]] += coming[1]
        queues = [
            (d for d in in_order if d not in spared and self._owns_memory(d))
            for (_, is_kept), in_order in self._by_use.items()
            if is_kept == is_pinned
        ]
        # one of each tenant: what the others hold stays the same when it gives way
        firsts = [
            (turn_to_go(first, held), first, queue)
            for queue in queues
            if (first := next(queue, None)) is not None
        ]
        heapify(firsts)
        while firsts:
            _, oldest, queue = firsts[0]
            yield oldest
            held[oldest.key.tenant] -= oldest.units
            following = next(queue, None)
            if following is None:
                heappop(firsts)
            else:
                heapreplace(firsts, (turn_to_go(following, held), following, queue))

    def _owns_memory(self, document: CachedDocument) -> bool:
        """Does the cache alone own some of its memory?"""
        return any(self._held.owns_alone(span) for span in document.spans)

    def _mark(self, document: CachedDocument, ids: Collection[str], is_pinned: bool) -> None:
        """Note the stored documents that it contains, and pin it if pins have room for it."""
        if not document.ids.issuperset(ids):
            document.ids |= frozenset(ids)
            document.is_saved = False
            for span in document.spans:
                span.is_private = True
            document.spans[-1].ids |= frozenset(ids)
            self._note_ids(document)
            self.num_changes += 1
        if is_pinned and not document.is_pinned:
            self._held_pinned.add(document)
            if self.pinned <= self.pin_limit:
                self._take_from_order(document)
                document.is_pinned = True
                self._touch(document)
                self._note_ids(document)
            else:
                self._held_pinned.remove(document)
            self.num_changes += 1

    def _drop(self, document: CachedDocument) -> None:
        document.entry.is_dropped = True
        del self._documents[document]
        self._note_ids(document)
        self._take_from_order(document)
        if document.name is None:
            beginning = document.key, _beginning(document.tokens)
            del self._by_beginning[beginning][document]
            if not self._by_beginning[beginning]:
                del self._by_beginning[beginning]
        if self.find_segment(document.key, document.name or b"") is document:
            del self._segments[document.key, document.name or b""]
        self._held.remove(document)
        if document.is_pinned:
            self._held_pinned.remove(document)
        for span in document.spans:
            self._pool.release(span)
        self.num_changes += 1

    def _note_ids(self, document: CachedDocument) -> None:
        """Note for `stored` that a document has come, has gone, or was marked."""
        self._changed_ids |= document.ids
        for name in document.ids:
            having = self._having.setdefault(name, {})
            if not document.is_dropped:
                having[document] = None
                continue
            having.pop(document, None)
            if not having:
                del self._having[name]

    def _touch(self, document: CachedDocument) -> None:
        self._clock += 1
        document.last_used = self._clock
        document.used_s = time.monotonic()
        if not document.is_dropped:
            in_order = self._by_use.setdefault((document.key.tenant, document.is_pinned), {})
            in_order.pop(document, None)
            in_order[document] = None

    def _take_from_order(self, document: CachedDocument) -> None:
        order = document.key.tenant, document.is_pinned
        del self._by_use[order][document]
        if not self._by_use[order]:
            del self._by_use[order]


def turn_to_go(d: CachedDocument, held: Mapping[bytes, int]) -> tuple[int, int]:
    """The lowest goes first: the least recently used one of the tenant that holds most.

    `held`: units of each tenant, with those that it is about to get.
    """
    return (-held[d.key.tenant], d.last_used)


def _beginning(tokens: Tokens) -> bytes:
    """What prompts must have in common so that one can take over any of the other."""
    return tokens[:FEWEST_TOKENS].tobytes()


def _is_beginning(document: CachedDocument, tokens: Tokens) -> bool:
    """Does a pass over `tokens` leave out less of the document than is worth keeping?"""
    return len(document.tokens) - num_common(document.tokens, tokens) < FEWEST_TOKENS
