"""What passes leave to the document cache when they have ended. No torch."""

from __future__ import annotations

from gemserve.engine.cache.common_tokens import Tokens
from gemserve.engine.cache.document_cache import CacheKey, DocumentCache
from gemserve.engine.memory import MemoryPool
from gemserve.engine.sequence.sequence import Sequence


def leave_filter_pass(
    cache: DocumentCache,
    pool: MemoryPool,
    sequence: Sequence,
    key: CacheKey,
    tokens: Tokens,
    *,
    pass_units: int,
    needed: int | None,
) -> None:
    """Let the cache have a filter pass's memory, if the sequence can get `needed` units anew.

    `needed` None: it waits for more than it has. In both cases it may keep what it had instead.
    """
    ids, is_pinned = sequence.request.documents, sequence.request.pin
    if not cache.wants(key, tokens, pass_units, ids, is_pinned):
        return
    span, sequence.span = sequence.memory, None
    if needed is not None:
        if needed <= pool.free + cache.used - cache.pinned:  # else nothing is evicted in vain
            cache.make_room(needed, tenant=key.tenant)
            sequence.span = pool.allocate(needed)
        if sequence.span is None:
            sequence.span = span
            return
        sequence.span.is_private = span.is_private
    pool.shrink(span, pass_units)
    cache.add(key, tokens, span, ids, is_pinned)


def leave_whole_prompt(
    cache: DocumentCache, pool: MemoryPool, sequence: Sequence, num_layers: int
) -> None:
    """Let the cache have the memory of an answered prompt that was read whole, if it wants it.

    It keeps the prompt's keys and values alone. Those of the answer were computed token by token,
    and may differ in the last digit from what reading them as a prompt gives.
    """
    key, tokens = sequence.cache_key, sequence.tokens
    if key is None or not sequence.is_whole:
        return
    ids, is_pinned = sequence.request.documents, sequence.request.pin
    if not cache.wants(key, tokens, sequence.document_units(num_layers), ids, is_pinned):
        return
    span, sequence.span = sequence.memory, None
    pool.repack(span, key.token_units(num_layers), len(tokens))
    cache.add(key, tokens, span, ids, is_pinned)
