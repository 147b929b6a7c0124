"""Where sequences meet the document cache: what a prompt takes over, and what it leaves. No torch.

A filter pass shares the keys and values of a cached document: it reads them where they are, and its
own memory has room for the other tokens only. It copies a beginning that is less than half of what
lies there together. A decode step reads one place for each sequence. So
what a prompt that is read whole takes over is copied into its own memory: from a cached prompt, or
from a request whose answer has not ended. If layers have a sliding window, it goes on where a whole
window before it is kept: see `kv_layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemserve.contract.reading_notes import HeldPart
from gemserve.cost import ModelShape
from gemserve.engine.cache.common_tokens import Tokens
from gemserve.engine.cache.document_cache import (
    FEWEST_TOKENS,
    CachedDocument,
    CacheKey,
    DocumentCache,
)
from gemserve.engine.memory import KVPlace, MemoryPool, MemoryShare, Stretch, first_tokens
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Copy
from gemserve.errors import RequestError
from gemserve.kv_layout import KVLayout, Piece, WindowRoom

# Once this many later requests have overtaken a waiting request, no further one may.
MAX_TIMES_PASSED = 64
# A pass attends to each share on its own. What is in more of them is copied, into one place.
MOST_SHARES = 8
# those that are being answered, by their keys
Answering = Mapping[CacheKey, Sequence[LiveSequence]]


@dataclass(frozen=True, slots=True)
class CacheSource:
    """Where `count` tokens that a pass begins with are: in `shares`.

    `document`: whose shares these are. None: they are a running request's. `is_shared`: the pass
    reads them there; else they are copied.
    """

    shares: tuple[MemoryShare, ...]
    count: int
    document: CachedDocument | None
    is_shared: bool = False

    @property
    def num_shared(self) -> int:
        return self.count if self.is_shared else 0

    @property
    def is_private(self) -> bool:
        return any(share.span.is_private for share in self.shares)

    def room_of(self, planned: WindowRoom) -> WindowRoom:
        """The room of a sequence that takes this over, with what is saved of it."""
        assert self.shares[-1].room is not None
        return planned.going_on_from(self.shares[-1].room, self.count)[0]

    def copy_to(self, sequence: LiveSequence, layout: KVLayout) -> Copy:
        """The copy to an admitted sequence's memory."""
        key = sequence.cache_key
        assert key is not None
        source, target = tuple(share.stretch for share in self.shares), sequence.place
        copy = Copy(sequence.order, source, target, key.token_units(layout))
        planned = sequence.new_room(layout)
        if key.layer is not None or planned is None:
            return copy
        (share,) = self.shares
        assert share.room is not None
        of_share = KVPlace(share.span.start, share.capacity, room=share.room)
        windows = tuple(
            (_stretch(of_share, source, layout), _stretch(target, into, layout))
            for source, into in planned.going_on_from(share.room, self.count)[1]
        )
        return replace(copy, windows=windows, window_units=2 * layout.windowed)


def _stretch(place: KVPlace, piece: Piece, layout: KVLayout) -> Stretch:
    """Where a piece of the layers with a sliding window is."""
    assert place.room is not None
    start = place.start + 2 * layout.growing * place.capacity
    if not piece.is_recent:
        return Stretch(start, place.room.num_saved, piece.num_tokens, piece.slot)
    start += 2 * layout.windowed * place.room.num_saved
    return Stretch(start, place.room.recent, piece.num_tokens, piece.slot)


def answering_of(running: Iterable[LiveSequence]) -> Answering:
    """Those of the running sequences that are being answered."""
    found: dict[CacheKey, list[LiveSequence]] = {}
    for sequence in running:
        if sequence.state is State.DECODING and (key := sequence.cache_key) is not None:
            found.setdefault(key, []).append(sequence)
    return found


def find_source(
    cache: DocumentCache, sequence: LiveSequence, answering: Answering
) -> CacheSource | None:
    """Where most of what the sequence's pass begins with is."""
    document, count = find_cached(cache, sequence)
    other, other_count = find_answering(cache, sequence, answering)
    if other is not None and other_count > count:
        share = MemoryShare(other.memory, other.capacity, other_count, other.room)
        return CacheSource((share,), other_count, None)
    if document is None:
        return None
    shares = first_tokens(document.shares, count)
    # a short beginning would keep the whole span of a long document from becoming free
    is_most = 2 * shares[-1].count >= shares[-1].capacity
    is_shared = document.key.layer is not None and len(shares) <= MOST_SHARES and is_most
    return CacheSource(shares, count, document, is_shared)


def find_cached(cache: DocumentCache, sequence: LiveSequence) -> tuple[CachedDocument | None, int]:
    """The document that the pass begins like, and how many tokens of it."""
    key = sequence.cache_key
    if key is None or not cache.used:
        return None, 0
    # again only after a change: many long prompts may wait
    if sequence.found is None or sequence.found[0] != cache.num_changes:
        found = cache.find(key, sequence.tokens, sequence.most_cached, sequence.found)
        sequence.found = cache.num_changes, *found
    return sequence.found[1:]


def awaits_leader(
    cache: DocumentCache, sequence: LiveSequence, running: Iterable[LiveSequence], layout: KVLayout
) -> bool:
    """Is a pass under way that will leave enough of this prompt?"""
    key = sequence.cache_key
    if key is None or sequence.times_passed_led >= MAX_TIMES_PASSED:
        return False
    reading = State.PREFILLING if key.layer is None else State.FILTERING
    passes = (s for s in running if s.state is reading and s.cache_key == key)
    return any(_is_worth_waiting(cache, sequence, leader, layout) for leader in passes)


def find_answering(
    cache: DocumentCache, sequence: LiveSequence, answering: Answering
) -> tuple[LiveSequence | None, int]:
    """The sequence that is being answered with the most tokens in common.

    Its prompt was read by all layers, whole or what was chosen of it.
    """
    key, best, most = sequence.cache_key, None, FEWEST_TOKENS - 1
    if key is None or key.layer is not None or not cache.is_on:
        return None, 0
    for other in answering.get(key, ()):
        count = sequence.num_common_with(other)
        if count > most and not cache.has_forgotten(other.request.documents):
            best, most = other, count
    return (None, 0) if best is None else (best, most)


def leave_filter_pass(
    cache: DocumentCache,
    pool: MemoryPool,
    sequence: LiveSequence,
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
    if any(cache.has_forgotten(share.span.ids) for share in sequence.shared):
        return  # what it began with must not stay
    if not cache.wants(key, tokens, pass_units, ids, is_pinned):
        return
    span, sequence.span = sequence.memory, None
    if needed is not None:
        # else nothing is evicted in vain; what the pass shares stays, because it owns that, too
        if needed <= cache.available(needed):
            cache.make_room(needed, tenant=key.tenant)
            sequence.span = pool.allocate(needed)
        if sequence.span is None:
            sequence.span = span
            return
        sequence.span.is_private = span.is_private
    pool.shrink(span, pass_units)
    count = len(tokens) - sequence.num_shared
    shares, sequence.shared = (*sequence.shared, MemoryShare(span, count, count)), ()
    cache.add(key, tokens, shares, ids, is_pinned)


def leave_unfinished_pass(
    cache: DocumentCache, pool: MemoryPool, sequence: LiveSequence, layout: KVLayout
) -> None:
    """Let the cache have what a filter pass has read that is ended early, if it wants it.

    Segments are there already: see `reuse.segments`.
    """
    key, count = sequence.cache_key, sequence.done - sequence.num_shared
    if key is None or sequence.is_loading or count <= 0:
        return
    if any(cache.has_forgotten(share.span.ids) for share in sequence.shared):
        return  # what it began with must not stay
    tokens, ids = sequence.tokens[: sequence.done], sequence.request.documents
    rows = key.token_units(layout)
    if not cache.wants(key, tokens, rows * count, ids):
        return
    pass_units, capacity = sequence.reading_units(layout, sequence.num_shared), sequence.capacity
    span, sequence.span = sequence.memory, None
    pool.shrink(span, pass_units)
    pool.repack(span, [(rows, capacity, count)])
    shares, sequence.shared = (*sequence.shared, MemoryShare(span, count, count)), ()
    cache.add(key, tokens, shares, ids)


def leave_whole_prompt(
    cache: DocumentCache, pool: MemoryPool, sequence: LiveSequence, layout: KVLayout
) -> None:
    """Let the cache have the memory of a prompt that all layers read, if it wants it.

    It has as much as is read of one whose answer has not begun. It keeps the prompt's keys and
    values alone. Those of the answer were computed token by token, and may differ in the last digit
    from what reading them as a prompt gives. In layers with a sliding window it keeps what was
    saved.
    """
    key, tokens = sequence.cache_key, sequence.tokens
    if key is None or key.layer is not None:
        return
    if sequence.state is State.PREFILLING:
        tokens = tokens[: sequence.done]
    ids, is_pinned = sequence.request.documents, sequence.request.pin
    count, room = len(tokens), sequence.room
    left = None if room is None else room.left(count)
    if left is not None and not left.saved:
        return
    if not cache.wants(key, tokens, layout.units(count, left), ids, is_pinned):
        return
    span, sequence.span = sequence.memory, None
    areas = [(2 * layout.growing, sequence.capacity, count)]
    if room is not None and left is not None:
        windowed = 2 * layout.windowed
        areas += [(windowed, room.num_saved, left.num_saved), (windowed, room.recent, left.recent)]
    pool.repack(span, areas)
    share = MemoryShare(span, count, count, left)
    has_stable = sequence.begins_alike and count >= sequence.plan.num_stable
    num_stable = sequence.plan.num_stable if has_stable else 0
    cache.add(key, tokens, (share,), ids, is_pinned, num_stable=num_stable)


def note_held(cache: DocumentCache, sequence: LiveSequence, key: CacheKey, tokens: Tokens) -> None:
    """Note how much of the prompt, which begins with `tokens`, the cache holds now."""
    notes = sequence.request.notes
    if notes is not None:
        document, count = cache.find(key, tokens, len(tokens))
        if document is not None:
            share = min(1.0, count / sequence.num_prompt)
            notes.held.append(HeldPart(document.entry, 0.0, share))


def check_pin(sequence: LiveSequence, cache: DocumentCache, shape: ModelShape) -> None:
    """Raise `RequestError` if what is kept of a prompt could never be pinned."""
    unit, limit = shape.unit_bytes, cache.pin_limit
    size = sequence.reading_units(shape.kv_layout())
    if sequence.filter_layer is not None and size > limit:
        raise RequestError(
            f"pin: {sequence.num_read} tokens take {size * unit:,} bytes; pinned documents may "
            f"take {limit * unit:,} bytes in all, half of what the server keeps documents in",
            param="pin",
        )


def _is_worth_waiting(
    cache: DocumentCache, sequence: LiveSequence, leader: LiveSequence, layout: KVLayout
) -> bool:
    """Will the leader's pass end before the two, side by side, have read what both begin with?

    One of lower priority may take any time. One that adds little will not be kept.
    """
    is_later = leader.request.priority > sequence.request.priority
    if is_later or not cache.has_room(leader.document_units(layout)):
        return False
    gain = sequence.num_common_with(leader) - find_cached(cache, sequence)[1]
    return gain >= FEWEST_TOKENS and leader.remaining <= 2 * gain
