"""What a waiting prompt can take over: of a cached document, or of a request that is running.

A filter pass is taken over once it has ended and the cache has it. A prompt that was read whole has
its keys and values in its request's memory until the answer has ended, and is copied from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gemserve.engine.cache.document_cache import FEWEST_TOKENS, CachedDocument, DocumentCache
from gemserve.engine.memory import Span
from gemserve.engine.sequence.sequence import Sequence, State
from gemserve.engine.sequence.step_plan import Copy

# Once this many later requests have overtaken a waiting request, no further one may.
MAX_TIMES_PASSED = 64


@dataclass(frozen=True, slots=True)
class Source:
    """Where `count` tokens that a pass begins with are: in `span`, which has room for `capacity`.

    `document`: whose span that is. None: it is a running request's.
    """

    span: Span
    capacity: int
    count: int
    document: CachedDocument | None

    def copy_to(self, sequence: Sequence, num_layers: int) -> Copy:
        """The copy to an admitted sequence's memory, which is private from now on if this is."""
        key = sequence.cache_key
        assert key is not None
        sequence.memory.is_private |= self.span.is_private
        return Copy(self.span, self.capacity, sequence, self.count, key.token_units(num_layers))


def find_source(
    cache: DocumentCache, sequence: Sequence, running: Iterable[Sequence]
) -> Source | None:
    """Where most of what the sequence's pass begins with can be copied from."""
    document, count = find_cached(cache, sequence)
    other, other_count = find_answering(cache, sequence, running)
    if other is not None and other_count > count:
        return Source(other.memory, other.capacity, other_count, None)
    if document is not None:
        return Source(document.span, len(document.tokens), count, document)
    return None


def find_cached(cache: DocumentCache, sequence: Sequence) -> tuple[CachedDocument | None, int]:
    """The document that the pass begins like, and how many tokens of it."""
    key = sequence.cache_key
    if key is None or not cache.used:
        return None, 0
    # again only after a change: many long prompts may wait
    if sequence.found is None or sequence.found[0] != cache.num_changes:
        found = cache.find(key, sequence.tokens, sequence.most_cached)
        sequence.found = cache.num_changes, *found
    return sequence.found[1:]


def awaits_leader(
    cache: DocumentCache, sequence: Sequence, running: Iterable[Sequence], num_layers: int
) -> bool:
    """Is a pass under way that will leave enough of this prompt?"""
    key = sequence.cache_key
    if key is None or sequence.times_passed >= MAX_TIMES_PASSED:
        return False
    reading = State.PREFILLING if sequence.is_whole else State.FILTERING
    passes = (s for s in running if s.state is reading and s.cache_key == key)
    return any(_is_worth_waiting(cache, sequence, leader, num_layers) for leader in passes)


def find_answering(
    cache: DocumentCache, sequence: Sequence, running: Iterable[Sequence]
) -> tuple[Sequence | None, int]:
    """The prompt that was read whole and is being answered with the most tokens in common."""
    key, best, most = sequence.cache_key, None, FEWEST_TOKENS - 1
    if key is None or not sequence.is_whole or not cache.is_on:
        return None, 0
    for other in running:
        if other.state is State.DECODING and other.cache_key == key:
            count = sequence.num_common_with(other)
            if count > most and not cache.has_forgotten(other.request.documents):
                best, most = other, count
    return (None, 0) if best is None else (best, most)


def _is_worth_waiting(
    cache: DocumentCache, sequence: Sequence, leader: Sequence, num_layers: int
) -> bool:
    """Will the leader's pass end before the two, side by side, have read what both begin with?

    One of lower priority may take any time. One that adds little will not be kept.
    """
    is_later = leader.request.priority > sequence.request.priority
    if is_later or not cache.has_room(leader.document_units(num_layers)):
        return False
    gain = sequence.num_common_with(leader) - find_cached(cache, sequence)[1]
    return gain >= FEWEST_TOKENS and leader.remaining <= 2 * gain
