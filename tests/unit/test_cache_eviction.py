"""How many documents give way to a request, and how long it takes to find what is cached."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import numpy as np

from gemserve.engine.cache.common_tokens import as_tokens
from gemserve.engine.cache.document_cache import CacheKey, DocumentCache
from gemserve.engine.cache.state import StoredDocument
from gemserve.engine.memory import MemoryPool, MemoryShare, Span

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


def around_a_pass(
    *, num_on_each_side: int, num_tenants: int = 1
) -> tuple[DocumentCache, MemoryPool, Span]:
    """Documents and gaps of equal size in turn, with what must stay in the middle."""
    keys = [replace(KEY, tenant=b"%d" % number) for number in range(num_tenants)]
    pool = MemoryPool((4 * num_on_each_side + 1) * SIZE)
    spans = [pool.allocate(SIZE) for _ in range(4 * num_on_each_side + 1)]
    cache = DocumentCache(pool, pool.capacity)
    for number, span in enumerate(spans):
        assert span is not None
        if number % 2:
            pool.release(span)
        elif number != 2 * num_on_each_side:
            share = MemoryShare(span, 1, 1)
            key = keys[number // 2 % num_tenants]
            cache.add_segment(key, b"%d" % number, as_tokens([number]), share)
    fixed = spans[2 * num_on_each_side]
    assert fixed is not None
    return cache, pool, fixed


def test_a_few_documents_give_way_so_that_nobody_waits_for_a_pass_in_the_way() -> None:
    """A question waited for a chunk of another's long text: 45 s with a model of 1.5B."""
    cache, pool, fixed = around_a_pass(num_on_each_side=10)
    size = 12 * SIZE
    assert pool.free > size
    assert not pool.compact(size, [fixed])
    assert cache.make_place(size, [fixed], 2 * size)
    assert [document.name for document in cache.documents][:2] == [b"4", b"6"]
    assert pool.compact(size, [fixed])
    assert pool.allocate(size) is not None
    cache.check_integrity()
    pool.check_integrity()


def test_a_large_document_does_not_keep_small_ones_from_giving_way() -> None:
    """Nobody's did, if the one that was used longest ago had more than may give way."""
    cache, pool, fixed = around_a_pass(num_on_each_side=10)
    pool.release(fixed)
    assert pool.compact(21 * SIZE)
    spans = [pool.allocate(size * SIZE) for size in (11, 10)]
    assert None not in spans
    old = cache.add_segment(KEY, b"large", as_tokens([0]), MemoryShare(spans[0], 1, 1))
    for document in cache.documents[:-1]:
        cache.use_segment(document)
    assert cache.make_place(5 * SIZE, [spans[1]], 10 * SIZE)
    assert not old.is_dropped
    assert len(cache.documents) < 21


def test_making_place_beside_thousands_takes_no_longer() -> None:
    """Each document that gave way was followed by a look at all memory, and a refusal came anew
    with every step."""
    cache, pool, fixed = around_a_pass(num_on_each_side=2000)
    began_s = time.process_time()
    assert cache.make_place(3900 * SIZE, [fixed], 7800 * SIZE)
    for _ in range(100):
        assert not cache.make_place(4001 * SIZE, [fixed], 8002 * SIZE)
    assert time.process_time() - began_s < 1
    assert pool.compact(3900 * SIZE, [fixed])
    cache.check_integrity()


def test_making_place_beside_thousands_of_keys_takes_no_longer() -> None:
    """All keys were compared for each document that may give way: seconds, and again after each
    change as long as a pass was in the way."""
    cache, pool, fixed = around_a_pass(num_on_each_side=2000, num_tenants=4000)
    began_s = time.process_time()
    for more in (1, 2, 3):
        assert not cache.make_place((4000 + more) * SIZE, [fixed], 8002 * SIZE)
    assert cache.make_place(3900 * SIZE, [fixed], 7800 * SIZE)
    assert time.process_time() - began_s < 1.5
    assert pool.compact(3900 * SIZE, [fixed])
    cache.check_integrity()


def test_documents_are_found_as_fast_among_thousands() -> None:
    """After each change every waiting request was compared with every document: 1.5 s a step."""
    pool = MemoryPool(4000 * SIZE)
    cache = DocumentCache(pool, pool.capacity)
    prompts = np.random.default_rng(0).integers(0, 1000, (4000, 300))
    for prompt in prompts:
        span = pool.allocate(SIZE)
        assert span is not None
        cache.add(KEY, prompt, (MemoryShare(span, 300, 300),))
    began_s = time.process_time()
    for prompt in prompts[:1000]:
        document, count = cache.find(KEY, prompt, 299)
        assert document is not None
        assert document.tokens.tolist() == prompt.tolist()
        assert count == 299
    assert time.process_time() - began_s < 1


def test_what_is_held_of_stored_documents_is_told_as_fast_among_thousands() -> None:
    """After each change, and so in most steps, all that is cached was counted anew."""
    pool = MemoryPool(4000 * SIZE)
    cache = DocumentCache(pool, pool.capacity)
    for number in range(4000):
        span = pool.allocate(SIZE)
        assert span is not None
        tokens, share = as_tokens([number]), MemoryShare(span, 1, 1)
        cache.add_segment(KEY, b"%d" % number, tokens, share, [f"doc-{number // 4}"])
    before = cache.stored()
    began_s = time.process_time()
    for document in cache.documents[:500]:
        cache.drop_segment(document)
        cache.stored()
    assert time.process_time() - began_s < 1
    assert len(cache.stored()) == 875
    assert len(before) == 1000
    assert cache.stored()["doc-999"] == StoredDocument(4 * SIZE, 4, is_pinned=False)
    cache.check_integrity()


def test_a_conversation_that_finds_no_room_does_not_take_its_beginning_along() -> None:
    """Where running passes owned what the cache may hold, the next turn read all of it anew."""
    pool = MemoryPool(10 * SIZE)
    cache = DocumentCache(pool, 3 * SIZE)
    first, other, further = pool.allocate(SIZE), pool.allocate(SIZE), pool.allocate(2 * SIZE)
    assert first is not None
    assert other is not None
    assert further is not None
    tokens = np.arange(600)
    cache.add(KEY, tokens[:300], (MemoryShare(first, 300, 300),))
    cache.add(KEY, tokens[300:], (MemoryShare(other, 300, 300),))
    for span in (first, other):  # passes read both
        pool.retain(span)
    shares = MemoryShare(first, 300, 300), MemoryShare(further, 300, 300)
    cache.add(KEY, tokens, shares, ["doc"])
    assert [document.tokens[0] for document in cache.documents] == [0, 300]
    assert cache.find(KEY, tokens, 600)[1] == 300
    assert cache.documents[0].ids == {"doc"}, "it may contain that"
    cache.check_integrity()
    pool.check_integrity()
    pool.release(other)  # now one of the two can give way
    pool.retain(first)
    again = pool.allocate(2 * SIZE)
    assert again is not None
    cache.add(KEY, tokens, (MemoryShare(first, 300, 300), MemoryShare(again, 300, 300)))
    assert [len(document.tokens) for document in cache.documents] == [600]
    cache.check_integrity()
    pool.check_integrity()


def test_none_gives_way_where_that_does_not_help() -> None:
    cache, _, fixed = around_a_pass(num_on_each_side=10)
    assert not cache.make_place(
        20 * SIZE + 1, [fixed], 40 * SIZE
    )  # more than there is on either side
    assert len(cache.documents) == 20
    cache, _, fixed = around_a_pass(num_on_each_side=2)
    kept = cache.documents
    assert not cache.make_place(3 * SIZE, [fixed], 6 * SIZE, spared=kept)
    assert cache.documents == kept
