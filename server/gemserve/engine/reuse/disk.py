"""Documents of the cache on the disk: kept when memory is needed, and after a restart.

A segment is in a file of its own, so it is found again wherever it stands in a prompt. What a pass
will read next of segments is loaded while it reads the present ones, into memory that the cache
owns from the beginning. So a segment that must give way meanwhile is computed.

The engine's thread copies blocks between the pool and host memory, a few MiB in each step. So
nothing that the other threads work on can move or be given away. A file that cannot be read or
written costs its request some time and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty
from typing import Protocol

from gemserve.contract.filter_plan import GROUP_TOKENS
from gemserve.cost import ModelShape, filter_units
from gemserve.engine.cache.common_tokens import Tokens
from gemserve.engine.cache.document_cache import (
    FEWEST_TOKENS,
    CachedDocument,
    CacheKey,
    DocumentCache,
)
from gemserve.engine.cache.files import CHAIN_TOKENS, FileInfo, hash_chain, hash_segment
from gemserve.engine.cache.folder import CacheFolder
from gemserve.engine.cache.state import CacheState, DiskCounts
from gemserve.engine.memory import KVPlace, MemoryShare, Stretch
from gemserve.engine.reuse.disk_threads import CacheThreads, FileLoad, FileSave
from gemserve.engine.reuse.segments import segment_key, segment_tokens
from gemserve.engine.sequence.segment_pass import SegmentPass
from gemserve.engine.sequence.sequence import LiveSequence, State

log = logging.getLogger("gemserve.engine")
_STEP_BLOCKS = 4  # most blocks that one step copies into the pool
_GROUPS_AHEAD = 1  # groups of segments that are loaded while a pass reads another one
_OVERHEAD_S = 0.03  # of a load: until its sequence goes on
_STALL_S = 10.0  # without a block, after which the disk counts as broken
_PAUSE_S = 60.0  # without writing, after an error: a disk that is full may have room again
_FORGET_S = 600.0  # without a load, after which a disk counts as fast as it was at the start
_LONGEST_TURN_S = 0.5  # that counts as waiting: a process that was stopped has not waited


class HostCopies(Protocol):
    """Copies `num_units` of each of some tokens between the pool and the host, for filter passes.

    `dtype`: of the numbers, as a safetensors file names it.
    """

    @property
    def dtype(self) -> str: ...
    def take(
        self, stretches: Sequence[Stretch], num_units: int, start: int, count: int
    ) -> memoryview: ...
    def put(self, place: KVPlace, num_units: int, start: int, data: bytes | bytearray) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class PassLoad(FileLoad):
    """A load of the first tokens of a sequence's pass, into the sequence's own memory."""

    sequence: LiveSequence

    @property
    def is_wanted(self) -> bool:
        return self.sequence.state is State.FILTERING

    @property
    def place(self) -> KVPlace:
        return self.sequence.place

    @property
    def layer(self) -> int:
        assert self.sequence.filter_layer is not None
        return self.sequence.filter_layer


@dataclass(slots=True, eq=False, kw_only=True)
class SegmentLoad(FileLoad):
    """A load of a segment, into memory of the cache: `document` is not complete yet."""

    document: CachedDocument
    is_wanted: bool = True  # by a pass that will read it

    @property
    def segment(self) -> tuple[CacheKey, bytes | None]:
        return self.document.key, self.document.name

    @property
    def place(self) -> KVPlace:
        (share,) = self.document.shares
        return KVPlace(share.span.start, share.capacity)

    @property
    def layer(self) -> int:
        assert self.document.key.layer is not None
        return self.document.key.layer


@dataclass(slots=True, eq=False)
class SegmentReader:
    """A sequence that reads segments. `num_looked`: groups that were looked for on the disk."""

    sequence: LiveSequence
    reading: SegmentPass
    key: CacheKey
    num_looked: int = 0
    has_hit: bool = False

    @property
    def awaited(self) -> set[tuple[CacheKey, bytes | None]]:
        """The segments of the next group, as long as nobody has looked what of it is cached."""
        reading = self.reading
        if reading.found is not None or reading.next_group == len(reading.groups):
            return set()
        return self.segments_of(reading.next_group)

    @property
    def wanted(self) -> set[tuple[CacheKey, bytes | None]]:
        """The segments that should be loaded, if they are on the disk."""
        ahead = range(self.reading.next_group + 1, self.num_looked)
        return self.awaited.union(*map(self.segments_of, ahead))

    def segments_of(self, group: int) -> set[tuple[CacheKey, bytes | None]]:
        segments = self.reading.plan.segments
        return {(self.key, segments[index].name) for index in self.reading.groups[group]}


class DiskCache:
    """Saves the documents of `cache` in the background, and loads them where that saves time.

    Only the engine's thread may use it. `identity`: everything that keys and values depend on
    besides what is in a `CacheKey`. `seconds_per_cost` tells how fast the server computes.
    """

    def __init__(
        self,
        folder: CacheFolder,
        cache: DocumentCache,
        copies: HostCopies,
        shape: ModelShape,
        identity: str,
        seconds_per_cost: Callable[[], float | None],
    ) -> None:
        self.counts = DiskCounts()
        self.folder = folder
        self._cache, self._copies, self._shape = cache, copies, shape
        self._identity, self._seconds_per_cost = identity, seconds_per_cost
        self._threads = CacheThreads(folder.key)
        self._bytes_per_s = folder.bytes_per_s
        self._measured_s = time.monotonic()  # when
        self._loads: list[PassLoad | SegmentLoad] = []
        self._readers: list[SegmentReader] = []
        self._save: FileSave | None = None
        self._seen_changes = -1
        self._is_writing = True
        self._is_gone = False  # the folder, when it was last looked for
        self._writes_again_s = 0.0  # after an error
        self._has_moved = False
        self._seen_s = 0.0  # when loads were last looked at, and how long none has come on
        self._stalled_s = 0.0

    @property
    def has_work(self) -> bool:
        """Is something being read or written, or waiting for that?"""
        is_unseen = self._can_write and self._seen_changes != self._cache.num_changes
        # `work` lets those go that read no more
        has_ended = not all(map(_reads_on, self._readers))
        return bool(self._loads or has_ended or self._save is not None or is_unseen)

    @property
    def _can_write(self) -> bool:
        return self._is_writing and time.monotonic() >= self._writes_again_s

    def wait(self, seconds: float) -> None:
        """Wait until a thread has done something, if the engine has nothing else to do."""
        self._threads.changed.wait(seconds)
        self._threads.changed.clear()

    def begin_load(self, sequence: LiveSequence, num_cached: int) -> bool:
        """Begin to load what a file has of an admitted sequence, if that is worth it.

        `num_cached`: tokens that it has already. Its pass must not begin before the load has ended.
        """
        if not len(self.folder):
            return False
        if sequence.segment_pass is not None:
            return self._begin_segments(sequence, sequence.segment_pass)
        key = sequence.cache_key
        if key is None or key.layer is None:
            return False
        if sequence.most_cached - num_cached < CHAIN_TOKENS:
            return False
        chain = self._chain(key, sequence.tokens[: sequence.most_cached])
        info, num_links = self.folder.find(chain)
        stop = CHAIN_TOKENS * num_links
        if info is None or not self._is_worth_loading(info, key.layer, num_cached, stop):
            return False
        sequence.is_loading = True
        sequence.memory.is_private |= bool(info.ids)
        block = num_cached // info.block_tokens
        self._begin(PassLoad(sequence=sequence, info=info, num_tokens=stop, block=block))
        return True

    def work(self) -> None:
        """Go on with what is under way: call this between two steps."""
        self._has_moved = False
        for load in list(self._loads):
            self._go_on_loading(load)
        self._watch_loads()
        self._serve_readers()
        if self._save is not None:
            self._go_on_saving(self._save)
        if self._save is None and self._can_write:
            self._begin_save()

    def forget(self, ids: Collection[str]) -> None:
        """Delete what contains these stored documents, written or half written.

        A thread that is writing one goes on to the end of its block, in a file without a name.
        """
        save = self._save
        # it may have been named when its file had begun
        if save is not None and not (save.info.ids | save.document.ids).isdisjoint(ids):
            self._cancel(save)
        self.folder.forget(ids)

    def close(self) -> None:
        """End what is under way. Files that are not complete are removed. Idempotent."""
        for load in list(self._loads):
            self._cancel_load(load)
        if self._save is not None:
            self._cancel(self._save)
        self._is_writing = False
        self._threads.close()
        self.folder.close()

    def _chain(self, key: CacheKey, tokens: Tokens) -> tuple[bytes, ...]:
        return hash_chain(self.folder.key, self._seed(key), tokens)

    def _segment_chain(self, key: CacheKey, name: bytes) -> tuple[bytes, ...]:
        return (hash_segment(self.folder.key, self._seed(key), name),)

    def _seed(self, key: CacheKey) -> bytes:
        """What keys and values depend on besides the tokens."""
        fields = {
            "identity": self._identity,
            "tenant": key.tenant.hex(),
            "adapter": key.adapter,
            "layer": key.layer,
            **({"salt": key.salt} if key.salt else {}),
        }
        return json.dumps(fields, sort_keys=True).encode()

    def _is_worth_loading(self, info: FileInfo, layer: int, start: int, stop: int) -> bool:
        """Is loading tokens start..stop−1 of a pass faster than computing them?"""
        if stop - start < CHAIN_TOKENS:
            return False
        first = start - start % info.block_tokens
        waiting = sum(load.info.num_bytes for load in self._loads)
        flops = self._shape.filter_chunk(start, stop - start, layer)
        return self._is_worth(waiting + (stop - first) * info.token_bytes, flops, _OVERHEAD_S)

    def _is_worth(self, num_bytes: int, flops: float, overhead_s: float) -> bool:
        """Are so many bytes read faster than what they hold is computed?"""
        pace = self._seconds_per_cost() or self.folder.seconds_per_cost
        is_old = time.monotonic() - self._measured_s >= _FORGET_S
        if is_old and not self._threads.is_reading:  # it may have been busy, or have stalled once
            self._bytes_per_s = self.folder.bytes_per_s
        if pace is None or not self._bytes_per_s:
            return False
        return num_bytes / self._bytes_per_s + overhead_s < pace * flops

    def _begin(self, load: PassLoad | SegmentLoad) -> None:
        self._loads.append(load)
        self._threads.load(load)

    def _begin_segments(self, sequence: LiveSequence, reading: SegmentPass) -> bool:
        """Let a pass wait if the disk has some of its first segments. `work` begins to load them.

        Not here, because documents must not give way while a step is planned.
        """
        key = segment_key(sequence)
        if key is None:
            return False
        reader = SegmentReader(sequence, reading, key)
        self._readers.append(reader)
        has_files = bool(self._find_files(reader, reading.groups[0]))
        reader.num_looked = 0 if has_files else 1
        sequence.is_loading = has_files or not self._loading.isdisjoint(reader.awaited)
        if sequence.is_loading:
            self._threads.changed.set()
        return sequence.is_loading

    def _serve_readers(self) -> None:
        """Begin to load what passes read next, and let those go on that wait for nothing."""
        self._readers = [*filter(_reads_on, self._readers)]
        for reader in self._readers:
            stop = min(len(reader.reading.groups), reader.reading.next_group + 1 + _GROUPS_AHEAD)
            while reader.num_looked < stop:
                group = reader.reading.groups[reader.num_looked]
                reader.num_looked += 1
                self._load_group(reader, self._find_files(reader, group))
        loading = self._loading
        wanted = set[tuple[CacheKey, bytes | None]]()
        if loading:  # mostly nothing is
            wanted = wanted.union(*(reader.wanted for reader in self._readers))
        for load in self._loads:
            if isinstance(load, SegmentLoad):
                load.is_wanted = load.segment in wanted
        for reader in self._readers:
            is_loading = bool(loading) and not loading.isdisjoint(reader.awaited)
            reader.sequence.is_loading = is_loading

    @property
    def _loading(self) -> set[tuple[CacheKey, bytes | None]]:
        return {load.segment for load in self._loads if isinstance(load, SegmentLoad)}

    def _find_files(self, reader: SegmentReader, group: range) -> dict[int, FileInfo]:
        """By index, the files of those segments of a group that memory does not have."""
        seen, files = self._loading, dict[int, FileInfo]()
        for index in group:
            name = reader.reading.plan.segments[index].name
            if (
                self._cache.find_segment(reader.key, name) is None
                and (reader.key, name) not in seen
            ):
                info, _ = self.folder.find(self._segment_chain(reader.key, name))
                if info is not None:
                    files[index] = info
                    seen.add((reader.key, name))
        return files

    def _load_group(self, reader: SegmentReader, files: dict[int, FileInfo]) -> None:
        """Begin to load segments, if that is worth it."""
        key, reading, own = reader.key, reader.reading, reader.wanted
        assert key.layer is not None
        others = [
            load for load in self._loads if isinstance(load, PassLoad) or load.segment not in own
        ]
        num_bytes = sum(load.info.num_bytes for load in others)
        num_bytes += sum(info.num_bytes for info in files.values())
        flops = sum(self._shape.filter_chunk(0, f.num_tokens, key.layer) for f in files.values())
        if not files or not self._is_worth(num_bytes, flops, _OVERHEAD_S):
            return
        names = [reading.plan.segments[index].name for index in reading.left]
        present = {self._cache.find_segment(key, name) for name in names}
        spared = reading.used.union(document for document in present if document is not None)
        for index, info in files.items():
            name = reading.plan.segments[index].name
            tokens = segment_tokens(reading, reader.sequence, index)
            if len(tokens) != info.num_tokens:
                continue
            size = info.num_tokens * filter_units(key.layer)
            span = self._cache.room_for_segment(size, spared, key.tenant)
            if span is None:
                return
            share = MemoryShare(span, info.num_tokens, info.num_tokens)
            document = self._cache.add_segment(
                key, name, tokens, share, info.ids, is_complete=False
            )
            document.is_saved = True
            reading.used.add(document)
            spared.add(document)
            self._begin(SegmentLoad(document=document, info=info, num_tokens=info.num_tokens))

    def _go_on_loading(self, load: PassLoad | SegmentLoad) -> None:
        is_dropped = isinstance(load, SegmentLoad) and load.document.is_dropped
        if is_dropped or not load.is_wanted:
            self._cancel_load(load)
            return
        for _ in range(_STEP_BLOCKS):
            try:
                item = load.ready.get_nowait()
            except Empty:
                return
            self._has_moved = True
            if not isinstance(item, bytearray):
                self._end_load(load, item)
                return
            start, count = load.info.tokens_of(load.block)
            try:
                self._put(load, start, item)
            except Exception as error:
                load.is_cancelled = True
                self._end_load(load, error)
                return
            load.block += 1
            load.num_bytes += len(item)
            if isinstance(load, PassLoad):
                load.sequence.done = max(load.sequence.done, start + count)

    def _put(self, load: PassLoad | SegmentLoad, start: int, data: bytearray) -> None:
        """Write tokens `start`… of a load to where they go."""
        self._copies.put(load.place, filter_units(load.layer), start, data)

    def _cancel_load(self, load: PassLoad | SegmentLoad) -> None:
        load.is_cancelled = True
        self._loads.remove(load)
        if isinstance(load, SegmentLoad):
            self._cache.drop_segment(load.document)
        else:
            self._end_pass_load(load)

    def _end_load(self, load: PassLoad | SegmentLoad, error: Exception | None) -> None:
        self._loads.remove(load)
        if isinstance(error, FileNotFoundError) and not self.folder.has(load.info):
            pass  # it gave way to another one before it was opened
        elif error is not None and not self._has_folder():
            pass  # its file may be there again with the folder
        elif error is not None:
            self.counts.errors += 1
            log.warning("document cache: %s is removed: %s", load.info.path, error)
            self.folder.remove(load.info)
        elif load.num_bytes:
            seconds = max(1e-6, load.taken_s)
            self._bytes_per_s += 0.2 * (load.num_bytes / seconds - self._bytes_per_s)
            self._measured_s = time.monotonic()
            self.folder.touch(load.info)
        if isinstance(load, SegmentLoad):
            self._end_segment(load, error is None)
        else:
            self._end_pass_load(load)

    def _end_pass_load(self, load: PassLoad) -> None:
        """Let a pass go on behind what was loaded, which is all of it or a part."""
        sequence = load.sequence
        sequence.is_loading = False
        if sequence.done > sequence.num_cached:
            self.counts.hits += 1
            self.counts.hit_tokens += sequence.done - sequence.num_cached
            sequence.num_cached = sequence.done

    def _end_segment(self, load: SegmentLoad, is_good: bool) -> None:
        """Let passes find a segment that was loaded. One that was not is computed."""
        if not is_good:
            self._cache.drop_segment(load.document)
            return
        self._cache.complete_segment(load.document)
        self.counts.segments += 1
        self.counts.hit_tokens += load.num_tokens
        for reader in self._readers:
            if not reader.has_hit and load.segment in reader.wanted:
                reader.has_hit = True
                self.counts.hits += 1

    def _watch_loads(self) -> None:
        """Let prompts be computed if the disk does not answer any more."""
        now_s = time.monotonic()
        turn_s, self._seen_s = min(now_s - self._seen_s, _LONGEST_TURN_S), now_s
        is_moving = self._has_moved or not self._loads
        self._stalled_s = 0.0 if is_moving else self._stalled_s + turn_s
        if self._stalled_s < _STALL_S:
            return
        log.warning(
            "document cache: the disk is not used for %g s: nothing came from it for %g s",
            _FORGET_S,
            _STALL_S,
        )
        self._bytes_per_s, self._measured_s = 0.0, now_s
        # what is not worth writing until then would count as written for good
        self._writes_again_s = now_s + _FORGET_S
        for load in list(self._loads):
            self._cancel_load(load)

    def _has_folder(self) -> bool:
        """Is the folder still there? A network disk may come back, so it is asked again."""
        was_gone, self._is_gone = self._is_gone, not self.folder.is_own
        if self._is_gone and not was_gone:
            self.counts.errors += 1
            log.warning(
                "document cache: the disk is not used as long as %s is moved or deleted",
                self.folder.path,
            )
        return not self._is_gone

    def _begin_save(self) -> None:
        """Begin to write a document that is not on the disk, if one is worth it."""
        if self._seen_changes == self._cache.num_changes:
            return
        self._seen_changes = self._cache.num_changes
        if not self._has_folder():
            self._writes_again_s = time.monotonic() + _PAUSE_S
            return
        for document in self._cache.documents:
            if document.is_saved:
                continue
            document.is_saved = True
            layer = document.key.layer  # prompts read whole stay in memory only
            info = None if layer is None else self._new_file(document, layer)
            if info is None or not self.folder.make_room(info.num_bytes + (1 << 20)):
                continue
            self._save = FileSave(document, info)
            self._threads.save(self._save)
            self._seen_changes = -1  # there may be others
            return

    def _new_file(self, document: CachedDocument, layer: int) -> FileInfo | None:
        """The file for a document; None: it has one, or to load it would take too long."""
        key, num_tokens = document.key, len(document.tokens)
        if document.name is None:
            chain = self._chain(key, document.tokens)
        else:
            chain = self._segment_chain(key, document.name)
        known, num_links = self.folder.find(chain)
        num_missing = num_tokens - CHAIN_TOKENS * num_links if document.name is None else 0
        if known is not None and num_missing < FEWEST_TOKENS:
            self.folder.touch(known)
            if known.ids >= document.ids:
                return None
            self.folder.remove(known)  # it is written anew with these ids
        pace, shape = self._seconds_per_cost(), self._shape
        if pace is None or not chain:
            return None
        beginnings = self.folder.beginnings(chain)
        info = FileInfo(
            path=self.folder.path / f"kv-{chain[-1].hex()}.safetensors",
            chain=chain,
            num_tokens=num_tokens if document.name else CHAIN_TOKENS * len(chain),
            shape=(filter_units(layer), shape.num_kv_heads, shape.head_dim),
            dtype=self._copies.dtype,
            element_bytes=shape.element_bytes,
            block_tokens=CHAIN_TOKENS,
            ids=document.ids.union(*(f.ids for f in beginnings)),
            seconds_per_cost=pace,
        )
        # a segment is loaded with others of its group
        share = 1.0 if document.name is None else num_tokens / GROUP_TOKENS
        flops, num_bytes = shape.filter_chunk(0, info.num_tokens, layer), info.num_bytes
        return info if self._is_worth(num_bytes, flops, share * _OVERHEAD_S) else None

    def _go_on_saving(self, save: FileSave) -> None:
        if save.is_over:
            self._end_save(save)
            return
        if save.document.is_dropped and save.block < save.info.num_blocks:
            self._cancel(save)
            return
        if save.block < save.info.num_blocks and not save.given.full():
            start, count = save.info.tokens_of(save.block)
            try:
                save.given.put_nowait(self._take(save.document, start, count))
            except Exception as error:
                self.counts.errors += 1
                log.warning("document cache: a document is not written: %s", error)
                self._cancel(save)
                return
            save.block += 1

    def _take(self, document: CachedDocument, start: int, count: int) -> memoryview:
        assert document.key.layer is not None, "prompts read whole are not written to disk"
        stretches = [share.stretch for share in document.shares]
        return self._copies.take(stretches, filter_units(document.key.layer), start, count)

    def _end_save(self, save: FileSave) -> None:
        self._save = None
        if isinstance(save.result, FileInfo):
            self.counts.writes += 1
            self.folder.add(save.result)
        elif save.result is not None:
            self.counts.errors += 1
            log.warning(
                "document cache: nothing is written to disk for %g s: %s", _PAUSE_S, save.result
            )
            self._writes_again_s = time.monotonic() + _PAUSE_S

    def _cancel(self, save: FileSave) -> None:
        """Stop writing a file, and remove what there is of it."""
        with save.lock:
            save.is_cancelled = True
            if isinstance(save.result, FileInfo):
                self.folder.remove(save.result)
                save.result = None
        with suppress(OSError):
            save.info.path.with_suffix(".tmp").unlink()
        self._save = None


def _reads_on(reader: SegmentReader) -> bool:
    """Is its filter pass still under way?"""
    sequence = reader.sequence
    return segment_key(sequence) is not None and sequence.state is State.FILTERING


def state_of(cache: DocumentCache, disk: DiskCache | None, shape: ModelShape) -> CacheState:
    """The document cache at this moment: a copy that stays as it is."""
    return CacheState(
        counts=replace(cache.counts),
        disk=DiskCounts() if disk is None else replace(disk.counts),
        memory_bytes=cache.used * shape.unit_bytes,
        pinned_bytes=cache.pinned * shape.unit_bytes,
        disk_bytes=0 if disk is None else disk.folder.num_bytes,
        oldest_s=cache.oldest_s,
    )
