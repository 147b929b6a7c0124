"""The document cache is shared between tenants: nobody can drive out all that others have there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gemserve.engine.scheduling.scheduler import Scheduler
from tests.unit.test_document_cache import FakeMemory, cached, finish, sequence

CAPACITY = 100_000  # half of which documents may hold: ten of these
TOKENS = 1000


def store(s: Scheduler, memory: FakeMemory, tenant: bytes, numbers: Sequence[int]) -> None:
    for number in numbers:
        s.add(sequence(number, [number] * TOKENS, tenant=tenant))
        finish(s, memory)
        s.check_integrity()


def held(s: Scheduler) -> dict[bytes, list[int]]:
    """The number of each document, by tenant, in order of use."""
    found: dict[bytes, list[int]] = {}
    for document in sorted(s.cache.documents, key=lambda d: d.last_used):
        found.setdefault(document.key.tenant, []).append(document.tokens[0])
    return found


def test_one_tenant_s_flood_leaves_the_others_documents() -> None:
    """The least recently used one went, so that a flood drove out what everybody else had."""
    s, memory = cached(CAPACITY)
    store(s, memory, b"modest", [1, 2])
    store(s, memory, b"greedy", range(100, 130))
    assert held(s) == {b"modest": [1, 2], b"greedy": [*range(122, 130)]}


def test_a_tenant_that_comes_later_gets_its_share() -> None:
    s, memory = cached(CAPACITY)
    store(s, memory, b"first", range(100, 130))
    store(s, memory, b"second", range(200, 230))
    assert held(s) == {b"first": [*range(125, 130)], b"second": [*range(225, 230)]}
    store(s, memory, b"third", range(300, 330))
    assert Counter({k: len(v) for k, v in held(s).items()}).most_common()[0][1] == 4


def test_a_request_for_memory_takes_it_from_whoever_holds_most() -> None:
    s, memory = cached(CAPACITY)
    store(s, memory, b"modest", [1, 2])
    store(s, memory, b"greedy", range(100, 108))
    s.add(sequence(200, [9] * 15_000, tenant=b"greedy"))  # three quarters of all memory
    finish(s, memory)
    assert held(s)[b"modest"] == [1, 2]


def test_whoever_needs_memory_gives_up_its_own_documents_first() -> None:
    """With one document each, the other's went, because it was used longest ago."""
    s, memory = cached(CAPACITY)
    store(s, memory, b"modest", [1])
    store(s, memory, b"greedy", [100])
    s.add(sequence(200, [9] * 18_500, tenant=b"greedy"))  # all but the memory of one document
    finish(s, memory)
    assert held(s)[b"modest"] == [1]


def test_one_tenant_alone_keeps_what_it_used_last() -> None:
    s, memory = cached(CAPACITY)
    store(s, memory, b"", [*range(100, 110), 100, 110])
    assert held(s) == {b"": [*range(102, 110), 100, 110]}
