"""What a waiting prompt can take over: of a cached document, or of a pass under way."""

from __future__ import annotations

from collections.abc import Iterable

from gemserve.engine.document_cache import FEWEST_TOKENS, CachedDocument, DocumentCache
from gemserve.engine.sequence import Sequence, State

# Once this many later requests have overtaken a waiting request, no further one may.
MAX_TIMES_PASSED = 64


def find_cached(cache: DocumentCache, sequence: Sequence) -> tuple[CachedDocument | None, int]:
    """The document that the filter pass begins like, and how many tokens of it."""
    key = sequence.cache_key
    if key is None or sequence.chosen is not None or not cache.used:
        return None, 0
    # again only after a change: many long prompts may wait
    if sequence.found is None or sequence.found[0] != cache.num_changes:
        found = cache.find(key, sequence.tokens, sequence.most_cached)
        sequence.found = cache.num_changes, *found
    return sequence.found[1:]


def awaits_leader(cache: DocumentCache, sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Is a filter pass under way that will leave enough of this prompt in the cache?"""
    key = sequence.cache_key
    if key is None or sequence.chosen is not None or sequence.times_passed >= MAX_TIMES_PASSED:
        return False
    passes = (s for s in running if s.state is State.FILTERING and s.cache_key == key)
    return any(_is_worth_waiting(cache, sequence, leader) for leader in passes)


def _is_worth_waiting(cache: DocumentCache, sequence: Sequence, leader: Sequence) -> bool:
    """Will the leader's pass end before the two, side by side, have read what both begin with?

    One of lower priority may take any time. One that adds little will not be kept.
    """
    is_later = leader.request.priority > sequence.request.priority
    if is_later or not cache.has_room(leader.memory.size):
        return False
    gain = sequence.num_common_with(leader) - find_cached(cache, sequence)[1]
    return gain >= FEWEST_TOKENS and leader.remaining <= 2 * gain
