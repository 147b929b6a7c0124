"""One request's progress through the engine, as the scheduler sees it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gemserve.contract.filter_plan import FilterPlan
from gemserve.contract.requests import Request
from gemserve.cost import filter_units
from gemserve.engine.cache.common_tokens import Tokens, as_tokens, num_common
from gemserve.engine.cache.document_cache import FEWEST_TOKENS, CachedDocument, CacheKey
from gemserve.engine.memory import KVPlace, MemoryShare, Span
from gemserve.engine.sequence.segment_pass import SegmentPass
from gemserve.engine.sequence.text_index import TextIndex
from gemserve.errors import CapacityExceeded
from gemserve.kv_layout import KVLayout, WindowRoom

LAST = 1 << 30  # the priority of what is read in idle time: after everybody's


class State(Enum):
    WAITING = "waiting"
    FILTERING = "filtering"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class LiveSequence:
    """A request and how far it has come.

    `num_kept`: tokens the answer is generated from; before a filter has chosen, the plan's number.
    `done`: tokens that the current pass (filter or prefill) has run. `ids`: what the prefill pass
    reads: the prompt, or the tokens chosen from it and what separates them. `span`: its memory,
    from admission to its end. `shared`: the first tokens of its filter pass, which others have
    computed. `room`: what it has in layers with a sliding window, if its pass goes through all
    layers. `order` is its number, too, by which plans mean it.
    """

    request: Request
    order: int
    state: State = State.WAITING
    done: int = 0
    open_tokens: int = 0  # tokens of a chunk that has begun and has not finished
    open_s: float = 0.0  # how long that chunk's pass has run
    num_kept: int = field(init=False)
    ids: Sequence[int] = field(init=False)
    generated: list[int] = field(default_factory=list)
    chosen: Sequence[int] | None = field(init=False)  # kept positions; None: not chosen yet, or all
    span: Span | None = None
    shared: tuple[MemoryShare, ...] = ()
    room: WindowRoom | None = None
    is_loading: bool = False  # its filter pass waits for what the disk has of it
    num_found: int = 0  # tokens of its segments that the document cache had when it was admitted
    num_cached: int = 0  # tokens of its filter pass that the document cache had
    num_reused: int = 0  # tokens of its prefill pass that were taken over
    most_held: int = 0  # most units of memory at any time so far
    times_passed: int = 0  # later requests that were admitted first
    times_passed_led: int = 0  # of them while it waited for another's pass
    admission: int = 0  # its number among all admissions
    was_looked_at: bool = False  # whether it may be admitted
    is_beside: bool = False  # it was admitted though enough were being read
    is_beyond_part: bool = False  # likewise, though its tenant has its part of the memory
    blocks_since: int | None = None  # so many had been admitted when the others began to leave room
    decoded_at: int = -1  # when it was last chosen for a step: see `time_shares.TimeTurns`
    found: tuple[int, CachedDocument | None, int] | None = None  # see `find_cached`
    segment_pass: SegmentPass | None = field(init=False)
    text_index: TextIndex | None = None  # of what it may propose; None: nothing
    is_read_from_cache: bool = False  # whole, because the cache has so much of the prompt
    awaits_leader: bool = False  # it could begin, but another's pass will leave what it needs
    awaits_source: bool = False  # a choice was just made; see `Scheduler._take_over`
    # `found` of the other way to read it, filtered or whole: many long prompts may wait
    _found_else: tuple[int, CachedDocument | None, int] | None = None
    _tokens: Tokens | None = None
    _kept: tuple[Sequence[int], Tokens] | None = None
    _cache_key: CacheKey | None = None
    _in_common: dict[tuple[int, bool, bool, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompt, chosen = self.request.prompt_ids, self.plan.chosen
        self.num_kept, self.chosen = self.plan.num_kept, chosen
        self.ids = self.plan.joined
        if not self.ids:
            self.ids = prompt if chosen is None else [prompt[p] for p in chosen]
        self.segment_pass = None
        if self.plan.segments is not None:
            assert self.plan.layer is not None
            units = filter_units(self.plan.num_below)
            self.segment_pass = SegmentPass(self.plan.segments, self.plan.layer, units)

    @property
    def may_read_whole(self) -> bool:
        """Is it still open whether its prompt is filtered?"""
        return self.plan.may_read_whole and self.chosen is None

    def read_whole(self) -> None:
        """Read the prompt whole instead of filtering it."""
        assert self.may_read_whole
        self.is_read_from_cache, self.chosen = True, range(self.num_prompt)
        self.num_kept, self.ids = self.num_prompt, self.request.prompt_ids
        self.found, self._found_else = self._found_else, self.found

    def read_filtered(self) -> None:
        """Take back `read_whole`, before anything is read."""
        if self.is_read_from_cache:
            self.is_read_from_cache, self.chosen = False, None
            self.num_kept = self.plan.num_kept
            self.found, self._found_else = self._found_else, self.found

    def forget_found(self) -> None:
        """Let go of the documents that it has found, which may have been deleted."""
        self.found = self._found_else = None

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Meanwhile it is as if the prompt were read whole."""
        self.read_whole()
        try:
            yield
        finally:
            self.read_filtered()

    @property
    def plan(self) -> FilterPlan:
        """How its prompt is filtered."""
        assert self.request.plan is not None, "a request is planned before it is queued"
        return self.request.plan

    @property
    def memory(self) -> Span:
        """Its span of the pool. Only a running sequence has one."""
        assert self.span is not None, "a sequence that does not run has no memory"
        return self.span

    @property
    def filter_layer(self) -> int | None:
        """The layer where its filter pass ends. None: it has no filter pass."""
        return self.plan.layer

    @property
    def evicts(self) -> bool:
        """Is the whole prompt read by all layers, and are keys and values dropped after that?"""
        return self.plan.evicts

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_read(self) -> int:
        """Tokens of a pass over the whole prompt and a repeated question, if there is one."""
        return self.request.num_read

    @property
    def tokens(self) -> Tokens:
        """All tokens of the pass that `cache_key` belongs to."""
        if self.begins_alike:
            if self._kept is None or self._kept[0] is not self.ids:
                self._kept = self.ids, as_tokens(self.ids)
            return self._kept[1]
        if self.is_whole or not self.plan.repeated:
            return self.request.tokens
        if self._tokens is None:
            tokens = self.request.tokens, as_tokens(self.plan.repeated)
            self._tokens = np.concatenate(tokens)
        return self._tokens

    @property
    def is_whole(self) -> bool:
        """Is the answer generated from the whole prompt? False as long as a filter may choose."""
        has_chosen = self.filter_layer is None or self.chosen is not None
        num_chosen = self.num_kept if self.chosen is None else len(self.chosen)
        return has_chosen and not self.evicts and num_chosen == self.num_prompt

    @property
    def begins_alike(self) -> bool:
        """Would any choice from such a prompt begin with the same tokens as the one just made?

        These are, for example, an agent's instructions and tools.
        """
        has_chosen = self.chosen is not None and not self.evicts
        is_part = has_chosen and not self.is_whole
        return is_part and self.plan.num_stable >= FEWEST_TOKENS

    @property
    def cache_key(self) -> CacheKey | None:
        """What the document cache finds its pass by. None: it keeps nothing of that pass.

        The pass is the filter pass until a filter has chosen, then the one that the answer is
        generated from: over the whole prompt, or over a choice that `begins_alike`.
        """
        is_last = self.is_whole or self.begins_alike
        if self.is_whole and self.num_prompt <= FEWEST_TOKENS:
            return None
        if not is_last and (self.filter_layer is None or self.chosen is not None):
            return None
        if not is_last and self.segment_pass is not None:  # segments have keys of their own
            return None
        layer = None if is_last else self.filter_layer
        if self._cache_key is None or self._cache_key.layer != layer:
            adapter = self.request.adapter
            of_adapter = None if adapter is None else (adapter.name, adapter.version)
            request = self.request
            self._cache_key = CacheKey(request.tenant, of_adapter, layer, request.cache_salt)
        return self._cache_key

    @property
    def most_cached(self) -> int:
        """Tokens that the pass may leave out.

        A filter pass has to compute the rows that it watches, and a prefill pass those whose logits
        are needed: the last one, or all if the prompt is scored.
        """
        if not self.is_whole and not self.begins_alike:
            return min(self.plan.rows, default=0)
        return self.num_kept - 1 if self.request.prompt_logprobs is None else 0

    def num_common_with(self, other: LiveSequence) -> int:
        """How many tokens that it may leave out another sequence's pass of the same key has."""
        # what is compared changes when a filter has chosen
        memo = other.order, self.is_whole, self.begins_alike, len(other.tokens)
        count = self._in_common.get(memo)
        if count is None:
            count = min(self.most_cached, num_common(self.tokens, other.tokens))
            self._in_common[memo] = count
        return count if other.room is None else other.room.usable(count)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the queue, lowest first: by priority, then by arrival."""
        return self.request.priority, self.order

    @property
    def max_length(self) -> int:
        """Tokens whose keys and values generation may need."""
        return self.num_kept + self.request.sampling.max_tokens

    @property
    def capacity(self) -> int:
        """Tokens that each layer of the current pass has room for, beside the shared ones."""
        return self.num_read - self.num_shared if self.is_reading else self.max_length

    @property
    def num_shared(self) -> int:
        """Tokens at the beginning of its pass that it shares with others."""
        return sum(share.count for share in self.shared)

    @property
    def place(self) -> KVPlace:
        """Where the keys and values of its current pass are."""
        shared = tuple(share.stretch for share in self.shared)
        return KVPlace(self.memory.start, self.capacity, shared, self.room)

    @property
    def is_reading(self) -> bool:
        """Does the current pass read the whole prompt, to keep only a part of it?"""
        is_evicting = self.evicts and self.state is State.PREFILLING
        return is_evicting or self.state is State.FILTERING

    @property
    def num_evicted(self) -> int:
        """Difference between positions and KV cache slots while decoding."""
        return self.num_prompt - self.num_kept if self.evicts else 0

    @property
    def rope_length(self) -> int:
        """Positions up to the end of the longest answer, for rope that depends on length."""
        return self.request.adapter_positions + self.max_length + self.num_evicted

    @property
    def pass_length(self) -> int:
        """Tokens of the current pass."""
        if self.segment_pass is not None and self.state is State.FILTERING:
            return self.segment_pass.num_tokens
        return self.num_read if self.is_reading else self.num_kept

    @property
    def remaining(self) -> int:
        """Tokens that the current pass has not run yet."""
        return self.pass_length - self.done

    @property
    def left_to_read(self) -> int:
        """Tokens that are to be read before its answer, as far as that is known.

        Of a waiting sequence these are all, whatever the cache has of them.
        """
        has_chosen = self.filter_layer is None or self.chosen is not None
        if has_chosen:
            return (self.num_read if self.evicts else self.num_kept) - self.done
        segments = self.segment_pass
        length = self.num_read if segments is None else segments.num_tokens
        skipped = max(0, self.num_found - self.num_cached)
        return max(0, length - self.done - skipped) + self.read_after_filter

    @property
    def read_after_filter(self) -> int:
        """Tokens that all layers read once its filter has chosen."""
        is_over = self.request.ends_when_read or self.request.selects_only
        return 0 if is_over else self.num_kept

    @property
    def is_awaiting(self) -> bool:
        """Does its filter pass wait for what other engines read for it?"""
        reading = self.segment_pass if self.state is State.FILTERING else None
        return reading is not None and reading.is_awaiting

    @property
    def next_slot(self) -> int:
        """The slot for the newest token's keys and values, which the next step computes."""
        return self.num_kept + len(self.generated) - 1

    def new_room(self, layout: KVLayout) -> WindowRoom | None:
        """What the pass that reads its answer's prompt needs in layers with a sliding window.

        Saved is what the document cache may keep, see `cache_key`; before a filter has chosen, what
        it may keep then. No model with such layers evicts keys: see `FilterPlanner`.
        """
        assert not (self.evicts and layout.windowed)
        is_open = self.filter_layer is not None and self.chosen is None
        may_stay = is_open or self.is_whole or self.begins_alike
        boundaries = (self.plan.num_stable,) if self.plan.num_stable else ()
        return layout.room(self.max_length, self.num_kept if may_stay else 0, boundaries)

    def reading_units(self, layout: KVLayout, num_shared: int = 0) -> int:
        """Memory of a pass over the whole prompt, if only a part is kept.

        A pass before eviction holds K and V of all layers; for a filter pass, see `filter_units`.
        `num_shared`: tokens that the filter pass shares with others.
        """
        if self.evicts:
            return 2 * layout.num_layers * self.num_prompt
        if self.filter_layer is None:
            return 0
        if self.segment_pass is not None:
            return self.segment_pass.scratch_units
        return (self.num_read - num_shared) * filter_units(self.plan.num_below)

    def kept_units(self, layout: KVLayout) -> int:
        """Memory of generation: K and V of all layers."""
        return layout.units(self.max_length, self.new_room(layout))

    def document_units(self, layout: KVLayout) -> int:
        """Memory of what the document cache would keep of the current pass alone; 0: nothing."""
        key = self.cache_key
        if key is None:
            return 0
        count = len(self.tokens) - self.num_shared
        if key.layer is not None:
            return key.token_units(layout) * count
        room = self.new_room(layout)
        return layout.units(count, None if room is None else room.left(count))

    def reserved_units(self, layout: KVLayout, num_shared: int = 0) -> int:
        """The memory that admission reserves: the most that it needs from here on.

        Generation reuses the memory of reading. `num_shared`: see `reading_units`.
        """
        if self.chosen is not None:
            return self.kept_units(layout)
        if self.request.ends_when_read:
            return self.reading_units(layout, num_shared)
        return max(self.reading_units(layout, num_shared), self.kept_units(layout))


def check_capacity(
    sequence: LiveSequence, num_units: int, layout: KVLayout, unit_bytes: int
) -> None:
    """Raise `CapacityExceeded` if a new sequence needs more than all of the KV memory."""
    needed_units = sequence.reserved_units(layout)
    if needed_units > num_units:
        raise CapacityExceeded(
            tokens=sequence.num_prompt,
            kept=sequence.num_kept,
            max_tokens=sequence.request.sampling.max_tokens,
            needed_bytes=needed_units * unit_bytes,
            limit_bytes=num_units * unit_bytes,
        )
