"""What memory a waiting request would have, and its span once it begins. No torch.

Admission reserves a request's peak memory. What it takes over from the document cache, or from a
request that is being answered, is part of that, or lies elsewhere if it only shares it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import CachedDocument, DocumentCache
from gemserve.engine.memory import MemoryPool, Span
from gemserve.engine.reuse.cheapest_way import is_cheaper_whole
from gemserve.engine.reuse.lookup import Answering, CacheSource, find_source
from gemserve.engine.reuse.segments import found_segments
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.kv_layout import KVLayout

# Of an open chunk's tokens, as many of documents may give way so that nobody waits for its end.
CHUNK_PART = 0.25


class RequestMemory:
    """Says what a request needs of the memory pool, and gets it.

    `copied`, here: documents that must stay until this step's plan has been carried out.
    """

    def __init__(
        self, pool: MemoryPool, cache: DocumentCache, layout: KVLayout, shape: ModelShape | None
    ) -> None:
        """`shape`: the model's, by which the costs of reading a prompt whole and of filtering it
        are compared; None: they are not.
        """
        self._pool, self._cache = pool, cache
        self._layout, self._shape = layout, shape

    def needed(
        self, sequence: LiveSequence, answering: Answering, copied: Collection[CachedDocument]
    ) -> tuple[CacheSource | None, int]:
        """What a waiting sequence takes over, and the units that it needs then.

        It is read whole if it may be, if that is cheaper, and if there is memory for it.
        """
        sequence.read_filtered()
        shape, cache = self._shape, self._cache
        if shape is None or not sequence.may_read_whole:
            return self._needed_as_is(sequence, answering, copied)
        if is_cheaper_whole(cache, sequence, answering, shape):
            sequence.read_whole()
            source, size = self._needed_as_is(sequence, answering, copied)
            if source is not None and size <= self.available(size, source, copied):
                return source, size
            sequence.read_filtered()
        return self._needed_as_is(sequence, answering, copied)

    def available(
        self, size: int, source: CacheSource | None, copied: Collection[CachedDocument]
    ) -> int:
        """Units that a sequence which needs `size` can have now."""
        if size <= self._pool.free:
            return self._pool.free
        return self._cache.available(size, _spared(source, copied))

    def allocate(
        self,
        sequence: LiveSequence,
        size: int,
        source: CacheSource | None,
        copied: Collection[CachedDocument],
        running: Sequence[LiveSequence],
    ) -> Span | None:
        """A span for a sequence, which has so much memory available.

        Documents give way. Scattered free units are made one by compaction; what passes that have
        begun hold views of stays in its place. None: it is in the way until they have ended.
        """
        spared, tenant = _spared(source, copied), sequence.request.tenant
        self._cache.make_room(size, spared, tenant)
        span = self._pool.allocate(size)
        if span is None:
            self._cache.spare_moves(size, spared, tenant)
            span = self._pool.allocate(size)
        if span is None and self._compact(size, spared, tenant, running):
            span = self._pool.allocate(size)
            assert span is not None
        return span

    def _needed_as_is(
        self, sequence: LiveSequence, answering: Answering, copied: Collection[CachedDocument]
    ) -> tuple[CacheSource | None, int]:
        """The same for the way that the sequence is to be read.

        It takes over nothing if only the memory of that would let it run.
        """
        source = find_source(self._cache, sequence, answering)
        if source is not None:
            size = sequence.reserved_units(self._layout, source.num_shared)
            if source.document is None:
                return source, size
            if size <= self.available(size, source, copied):
                return source, size
        return None, sequence.reserved_units(self._layout)

    def _compact(
        self,
        size: int,
        spared: Collection[CachedDocument],
        tenant: bytes,
        running: Sequence[LiveSequence],
    ) -> bool:
        """Make scattered free units one; False: passes that have begun are in the way.

        Documents give way where that helps, since a chunk of a long prompt can take a minute. They
        must be read again, so it must be little beside that chunk.
        """
        open_passes = [s for s in running if s.open_tokens]
        fixed = [span for open_pass in open_passes for span in spans_of(open_pass)]
        if self._pool.compact(size, fixed):
            return True
        open_units = sum(s.open_tokens * s.memory.size // s.capacity for s in open_passes)
        most = int(CHUNK_PART * open_units)
        if not self._cache.make_place(size, fixed, most, spared, tenant):
            return False
        return self._pool.compact(size, fixed)


def spans_of(sequence: LiveSequence) -> Iterator[Span]:
    """What a pass over a running sequence's prompt holds views of."""
    yield sequence.memory
    yield from (share.span for share in sequence.shared)
    yield from (share.span for share in found_segments(sequence))


def _spared(
    source: CacheSource | None, copied: Collection[CachedDocument]
) -> Collection[CachedDocument]:
    """Documents that must not give way to a sequence that takes over `source`."""
    document = None if source is None else source.document
    return copied if document is None else [*copied, document]
