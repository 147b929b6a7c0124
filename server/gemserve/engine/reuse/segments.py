"""Where passes over segments meet the document cache. No torch.

A segment is found by its own tokens, wherever it stands in a prompt. A pass owns what it finds as
long as it reads it, and leaves a copy of what it has computed, because its own memory is for the
next segments.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gemserve.contract.filter_plan import Segment
from gemserve.contract.reading_notes import HeldPart
from gemserve.contract.requests import Request
from gemserve.engine.cache.common_tokens import Tokens
from gemserve.engine.cache.document_cache import FEWEST_TOKENS, CacheKey, DocumentCache
from gemserve.engine.memory import MemoryPool, MemoryShare
from gemserve.engine.reuse.lookup import MAX_TIMES_PASSED
from gemserve.engine.sequence.segment_pass import SegmentPass, SegmentRead
from gemserve.engine.sequence.sequence import LiveSequence, State


def find_segments(cache: DocumentCache, pool: MemoryPool, sequence: LiveSequence) -> None:
    """Own what the cache has of the next group of segments: nothing if others have read it."""
    reading = _reading(sequence)
    if reading.found is not None:
        return
    reading.begin_group()
    reading.found = {}
    if (arrived := reading.arrived.get(reading.next_group)) is not None:
        reading.num_cached += arrived.num_cached
        sequence.num_cached += arrived.cached_tokens
        return
    key = segment_key(sequence)
    if key is None:
        return
    for index in reading.group:
        document = cache.find_segment(key, reading.plan.segments[index].name)
        if document is None:
            continue
        (share,) = document.shares
        pool.retain(share.span)
        sequence.memory.is_private |= share.span.is_private
        documents = _documents_in(sequence.request, reading.plan.segments[index])
        cache.use_segment(document, documents, sequence.request.pin)
        reading.found[index] = share
        reading.used.add(document)
        reading.num_cached += 1
        sequence.num_cached += reading.plan.segments[index].num_tokens


def leave_segments(
    cache: DocumentCache, pool: MemoryPool, sequence: LiveSequence, reads: Iterable[SegmentRead]
) -> None:
    """Let the cache have what was computed of a group, and give up what was found of it."""
    reading = _reading(sequence)
    assert reading.found is not None
    key, request = segment_key(sequence), sequence.request
    for read in reads:
        segment = reading.plan.segments[read.index]
        if read.is_cached:
            continue
        is_wanted = key is not None and cache.find_segment(key, segment.name) is None
        # an index reads millions of tokens once, which would drive out what others ask about
        is_wanted = is_wanted and request.vectors_only is None
        if is_wanted and not cache.has_forgotten(request.documents):
            assert key is not None
            size = read.text.capacity * reading.token_units
            span = cache.room_for_segment(size, reading.used, key.tenant)
            if span is None:
                continue
            pool.copy(read.text.start, span)
            share = MemoryShare(span, read.text.capacity, read.text.count)
            tokens = segment_tokens(reading, sequence, read.index)
            documents = _documents_in(request, segment)
            document = cache.add_segment(key, segment.name, tokens, share, documents, request.pin)
            reading.used.add(document)
    _note_held(cache, sequence, reads)
    release_segments(pool, sequence)
    reading.end_group()


def lend_groups(cache: DocumentCache, sequence: LiveSequence, groups: Iterable[int]) -> None:
    """Let a sequence that has read nothing await these groups from others.

    It reads those itself of which the cache has half or more.
    """
    reading, key = _reading(sequence), segment_key(sequence)
    for number in groups:
        segments = [reading.plan.segments[index] for index in reading.groups[number]]
        cached = [] if key is None else [w for w in segments if cache.find_segment(key, w.name)]
        total = sum(segment.num_tokens for segment in segments)
        if 2 * sum(segment.num_tokens for segment in cached) < total:
            reading.lent.add(number)


def end_arrived(sequence: LiveSequence) -> None:
    """A group that another engine has read needs nothing more."""
    reading = _reading(sequence)
    del reading.arrived[reading.next_group]
    reading.found = None
    reading.end_group()


def _note_held(cache: DocumentCache, sequence: LiveSequence, reads: Iterable[SegmentRead]) -> None:
    """Note which segments of a group the cache holds now."""
    key, notes = segment_key(sequence), sequence.request.notes
    if key is None or notes is None:
        return
    for read in reads:
        segment = _reading(sequence).plan.segments[read.index]
        document = cache.find_segment(key, segment.name)
        if document is not None:
            start, stop = segment.start / sequence.num_prompt, segment.stop / sequence.num_prompt
            notes.held.append(HeldPart(document.entry, start, stop))


def release_segments(pool: MemoryPool, sequence: LiveSequence) -> None:
    """Give up the cached segments that a sequence's pass owns."""
    reading = sequence.segment_pass
    if reading is None:
        return
    for share in found_segments(sequence):
        pool.release(share.span)
    reading.found = None


def awaits_segments(
    cache: DocumentCache, sequence: LiveSequence, running: Iterable[LiveSequence]
) -> bool:
    """Is another pass about to leave enough of the segments that this one needs?"""
    key = segment_key(sequence)
    if key is None or sequence.times_passed_led >= MAX_TIMES_PASSED:
        return False
    for leader in running:
        is_alike = leader.state is State.FILTERING and segment_key(leader) == key
        is_alike = is_alike and leader.request.vectors_only is None
        if not is_alike or leader.request.priority > sequence.request.priority:
            continue
        wanted, _ = _look(cache, sequence, key)
        theirs = _reading(leader)
        left = [theirs.plan.segments[index] for index in theirs.left]
        gain = sum(segment.num_tokens for segment in left if segment.name in wanted)
        if gain >= FEWEST_TOKENS and theirs.num_tokens_of(theirs.left) <= 2 * gain:
            size = gain * theirs.token_units
            return cache.has_room(size)
    return False


def found_segments(sequence: LiveSequence) -> list[MemoryShare]:
    """What a sequence's pass owns of the cache."""
    reading = sequence.segment_pass
    return [] if reading is None else list((reading.found or {}).values())


def num_cached_tokens(cache: DocumentCache, sequence: LiveSequence) -> int:
    """Tokens of its segments that the cache has."""
    key = segment_key(sequence)
    return 0 if key is None else _look(cache, sequence, key)[1]


def _look(
    cache: DocumentCache, sequence: LiveSequence, key: CacheKey
) -> tuple[frozenset[bytes], int]:
    """The names of its segments that the cache lacks, and the tokens of those that it has."""
    reading = _reading(sequence)
    # again only after a change: many long prompts may wait
    if reading.looked is None or reading.looked[0] != cache.num_changes:
        segments = reading.plan.segments
        lacking = frozenset(s.name for s in segments if cache.find_segment(key, s.name) is None)
        count = sum(s.num_tokens for s in segments if s.name not in lacking)
        reading.looked = cache.num_changes, lacking, count
    return reading.looked[1:]


def segment_key(sequence: LiveSequence) -> CacheKey | None:
    """By what its segments are cached; None: it reads none now."""
    reading = sequence.segment_pass
    if reading is None or sequence.chosen is not None:
        return None
    adapter = sequence.request.adapter
    of_adapter = None if adapter is None else (adapter.name, adapter.version)
    request = sequence.request
    return CacheKey(request.tenant, of_adapter, reading.layer, request.cache_salt)


def _documents_in(request: Request, segment: Segment) -> tuple[str, ...]:
    """The ids of what a segment may contain: of files of libraries only its own."""
    files = {excerpt.file_id for excerpt in request.excerpts}
    own = {
        e.file_id for e in request.excerpts if (e.start, e.stop) == (segment.start, segment.stop)
    }
    if not own:
        return request.documents
    return tuple(each for each in request.documents if each not in files or each in own)


def _reading(sequence: LiveSequence) -> SegmentPass:
    assert sequence.segment_pass is not None
    return sequence.segment_pass


def segment_tokens(reading: SegmentPass, sequence: LiveSequence, index: int) -> Tokens:
    """What is read of a segment before the question."""
    segment = reading.plan.segments[index]
    anchor = np.asarray(reading.plan.anchor, dtype=np.int64)
    return np.concatenate([anchor, sequence.request.tokens[segment.start : segment.stop]])
