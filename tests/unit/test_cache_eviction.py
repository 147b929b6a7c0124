"""How many documents give way to a request, and how long it takes to find them."""

from __future__ import annotations

import time
from random import Random

from gemserve.engine.cache.common_tokens import as_tokens
from gemserve.engine.cache.document_cache import CacheKey, DocumentCache
from gemserve.engine.memory import MemoryPool, MemoryShare

SIZE = 10  # units of a document
KEY = CacheKey(b"", None, 2)


def small_documents(count: int) -> DocumentCache:
    """A request holds half of the memory; the other half has `count` documents, used at random."""
    pool = MemoryPool(2 * count * SIZE)
    pool.allocate(count * SIZE)
    cache = DocumentCache(pool, count * SIZE)
    documents = []
    for number in range(count):
        span = pool.allocate(SIZE)
        assert span is not None
        tokens, share = as_tokens([number]), MemoryShare(span, 1, 1)
        documents.append(cache.add_segment(KEY, b"%d" % number, tokens, share))
    Random(0).shuffle(documents)
    for document in documents:
        cache.use_segment(document)
    return cache


def test_hardly_any_document_gives_way_to_spare_what_costs_less() -> None:
    """673 of 700 went, each of which had to be read again, so that 700 need not be copied."""
    cache = small_documents(1000)
    cache.make_room(300 * SIZE)
    assert len(cache.documents) == 700
    cache.spare_moves(300 * SIZE)
    assert len(cache.documents) > 650
    cache.check_integrity()


def test_finding_them_takes_no_longer_with_thousands() -> None:
    """Each eviction looked at all documents: half of 1,500 took seconds, in one step of all."""
    cache = small_documents(8000)
    began_s = time.process_time()
    cache.make_room(4000 * SIZE)
    assert time.process_time() - began_s < 2
    assert len(cache.documents) == 4000
    cache.check_integrity()
