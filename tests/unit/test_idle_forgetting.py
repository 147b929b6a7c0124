"""Prompts that might be read in idle time are forgotten with the documents that they contain."""

from __future__ import annotations

from dataclasses import replace

from gemserve.engine.cache.document_cache import DocumentCache
from gemserve.engine.memory import MemoryPool
from gemserve.engine.reuse.idle_reading import Asked, IdleReading
from tests.unit.test_document_cache import ALL_GROW, sequence


def test_a_deleted_document_s_prompts_are_forgotten() -> None:
    """Its tokens stayed in memory until 16 other prompts had come."""
    idle = IdleReading(DocumentCache(MemoryPool(1000), 500), ALL_GROW)
    for number, ids in enumerate((("a", "b"), ("c",), ())):
        request = replace(sequence(number, [1, 2, 3]).request, documents=ids)
        idle._asked[number] = Asked(request)
    idle.forget(["b"])
    assert [*idle._asked] == [1, 2]
