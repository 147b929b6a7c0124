"""Documents of the cache on the disk: kept when memory is needed, and after a restart.

The engine's thread copies segments between the pool and host memory, a few MiB in each step. So
nothing that the other threads work on can move or be given away. A file that cannot be read or
written costs its request some time and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ids
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Protocol

from gemserve.cost import ModelShape, filter_units
from gemserve.engine.cache.common_tokens import Tokens
from gemserve.engine.cache.document_cache import (
    FEWEST_TOKENS,
    CachedDocument,
    CacheKey,
    DocumentCache,
)
from gemserve.engine.cache.files import CHAIN_TOKENS, FileInfo, hash_chain
from gemserve.engine.cache.folder import CacheFolder
from gemserve.engine.cache.state import CacheState, DiskCounts
from gemserve.engine.memory import KVPlace, Segment
from gemserve.engine.reuse.disk_threads import CacheThreads, FileLoad, FileSave
from gemserve.engine.sequence.sequence import Sequence, State

log = logging.getLogger("gemserve.engine")
_STEP_SEGMENTS = 4  # most segments that one step copies into the pool
_LONGEST_WAIT_S = 5.0  # for a file that is no longer wanted and is just being written
_OVERHEAD_S = 0.03  # of a load: until its sequence goes on
_STALL_S = 10.0  # without a segment, after which the disk counts as broken
_LONGEST_TURN_S = 0.5  # that counts as waiting: a process that was stopped has not waited


class HostCopies(Protocol):
    """Copies `num_units` of each of some tokens between the pool and the host, for filter passes.

    `dtype`: of the numbers, as a safetensors file names it.
    """

    @property
    def dtype(self) -> str: ...
    def take(
        self, segments: Ids[Segment], num_units: int, start: int, count: int
    ) -> memoryview: ...
    def put(self, place: KVPlace, num_units: int, start: int, data: bytes | bytearray) -> None: ...


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
        self._loads: list[FileLoad] = []
        self._save: FileSave | None = None
        self._seen_changes = -1
        self._is_writing = True
        self._seen_s = 0.0  # when loads were last looked at, and how long none has come on
        self._stalled_s = 0.0

    @property
    def has_work(self) -> bool:
        """Is something being read or written, or waiting for that?"""
        is_unseen = self._is_writing and self._seen_changes != self._cache.num_changes
        return bool(self._loads or self._save is not None or is_unseen)

    def wait(self, seconds: float) -> None:
        """Wait until a thread has done something, if the engine has nothing else to do."""
        self._threads.changed.wait(seconds)
        self._threads.changed.clear()

    def begin_load(self, sequence: Sequence, num_cached: int) -> bool:
        """Begin to load what a file has of an admitted sequence, if that is worth it.

        `num_cached`: tokens that it has already. Its pass must not begin before the load has ended.
        """
        key = sequence.cache_key
        if key is None or key.layer is None or not len(self.folder):
            return False
        if sequence.most_cached - num_cached < CHAIN_TOKENS:
            return False
        chain = self._chain(key, sequence.tokens[: sequence.most_cached])
        info, num_links = self.folder.find(chain)
        stop = CHAIN_TOKENS * num_links
        if info is None or not self._is_worth(info, key.layer, num_cached, stop):
            return False
        sequence.is_loading = True
        sequence.memory.is_private |= bool(info.ids)
        load = FileLoad(sequence, info, num_cached // info.segment_tokens, num_links)
        self._loads.append(load)
        self._threads.load(load)
        return True

    def work(self) -> None:
        """Go on with what is under way: call this between two steps."""
        before = sum(load.num_bytes for load in self._loads), len(self._loads)
        for load in list(self._loads):
            self._go_on_loading(load)
        self._watch_loads(before != (sum(load.num_bytes for load in self._loads), len(self._loads)))
        if self._save is not None:
            self._go_on_saving(self._save)
        if self._save is None and self._is_writing:
            self._begin_save()

    def forget(self, ids: Collection[str]) -> None:
        """Delete what contains these stored documents, written or half written."""
        save = self._save
        if save is not None and not save.info.ids.isdisjoint(ids):
            self._cancel(save)
            stop_s = time.monotonic() + _LONGEST_WAIT_S
            while not save.is_over and time.monotonic() < stop_s:
                self.wait(0.02)
        self.folder.forget(ids)

    def close(self) -> None:
        """End what is under way. Files that are not complete are removed. Idempotent."""
        for load in self._loads:
            load.is_cancelled = True
        if self._save is not None:
            self._cancel(self._save)
        self._is_writing = False
        self._threads.close()
        self.folder.close()

    def _chain(self, key: CacheKey, tokens: Tokens) -> tuple[bytes, ...]:
        fields = {
            "identity": self._identity,
            "tenant": key.tenant.hex(),
            "adapter": key.adapter,
            "layer": key.layer,
        }
        return hash_chain(self.folder.key, json.dumps(fields, sort_keys=True).encode(), tokens)

    def _is_worth(self, info: FileInfo, layer: int, start: int, stop: int) -> bool:
        """Is loading tokens start..stop−1 faster than computing them?"""
        pace = self._seconds_per_cost() or self.folder.seconds_per_cost
        if pace is None or not self._bytes_per_s or stop - start < CHAIN_TOKENS:
            return False
        first = start - start % info.segment_tokens
        waiting = sum(load.info.num_bytes for load in self._loads)
        seconds = (waiting + (stop - first) * info.token_bytes) / self._bytes_per_s
        computing_s = pace * self._shape.filter_chunk(start, stop - start, layer)
        return seconds + _OVERHEAD_S < computing_s

    def _go_on_loading(self, load: FileLoad) -> None:
        sequence = load.sequence
        if sequence.state is not State.FILTERING:  # it was cancelled
            load.is_cancelled = True
            self._loads.remove(load)
            return
        for _ in range(_STEP_SEGMENTS):
            try:
                item = load.ready.get_nowait()
            except Empty:
                return
            if not isinstance(item, bytearray):
                self._end_load(load, item)
                return
            start, count = load.info.tokens_of(load.segment)
            try:
                self._put(sequence, start, item)
            except Exception as error:
                load.is_cancelled = True
                self._end_load(load, error)
                return
            load.segment += 1
            load.num_bytes += len(item)
            sequence.done = max(sequence.done, start + count)

    def _put(self, sequence: Sequence, start: int, data: bytearray) -> None:
        """Write tokens `start`… of a filter pass into its memory, but those that it shares."""
        assert sequence.filter_layer is not None
        self._copies.put(sequence.place, filter_units(sequence.filter_layer), start, data)

    def _end_load(self, load: FileLoad, error: Exception | None) -> None:
        sequence = load.sequence
        self._loads.remove(load)
        sequence.is_loading = False
        if error is not None:
            self.counts.errors += 1
            log.warning("document cache: %s is removed: %s", load.info.path, error)
            self.folder.remove(load.info)
        elif load.num_bytes:
            seconds = max(1e-6, time.perf_counter() - load.started_s)
            self._bytes_per_s += 0.2 * (load.num_bytes / seconds - self._bytes_per_s)
            self.folder.touch(load.info)
        if sequence.done > sequence.num_cached:
            self.counts.hits += 1
            self.counts.hit_tokens += sequence.done - sequence.num_cached
            sequence.num_cached = sequence.done

    def _watch_loads(self, has_moved: bool) -> None:
        """Let prompts be computed if the disk does not answer any more."""
        now_s = time.monotonic()
        turn_s, self._seen_s = min(now_s - self._seen_s, _LONGEST_TURN_S), now_s
        self._stalled_s = 0.0 if has_moved or not self._loads else self._stalled_s + turn_s
        if self._stalled_s < _STALL_S:
            return
        log.warning(
            "document cache: the disk is not used any more: nothing came from it for %g s",
            _STALL_S,
        )
        self._bytes_per_s = 0.0
        for load in self._loads:
            load.is_cancelled = True
            load.sequence.is_loading = False
        self._loads = []

    def _begin_save(self) -> None:
        """Begin to write a document that is not on the disk, if one is worth it."""
        self._seen_changes = self._cache.num_changes
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
        chain = self._chain(key, document.tokens)
        known, num_links = self.folder.find(chain)
        if known is not None and num_tokens - CHAIN_TOKENS * num_links < FEWEST_TOKENS:
            self.folder.touch(known)
            if known.ids >= document.ids:
                return None
            self.folder.remove(known)  # it is written anew with these ids
        pace, shape = self._seconds_per_cost(), self._shape
        if pace is None or not chain:
            return None
        beginnings = [f for f in self.folder.files if f.chain == chain[: len(f.chain)]]
        info = FileInfo(
            path=self.folder.path / f"kv-{chain[-1].hex()}.safetensors",
            chain=chain,
            shape=(filter_units(layer), shape.num_kv_heads, shape.head_dim),
            dtype=self._copies.dtype,
            element_bytes=shape.element_bytes,
            segment_tokens=CHAIN_TOKENS,
            ids=document.ids.union(*(f.ids for f in beginnings)),
            seconds_per_cost=pace,
        )
        if not self._is_worth(info, layer, 0, info.num_tokens):
            return None
        return info

    def _go_on_saving(self, save: FileSave) -> None:
        if save.is_over:
            self._end_save(save)
            return
        if save.document.is_dropped and save.segment < save.info.num_segments:
            self._cancel(save)
            return
        if save.segment < save.info.num_segments and not save.given.full():
            start, count = save.info.tokens_of(save.segment)
            try:
                save.given.put_nowait(self._take(save.document, start, count))
            except Exception as error:
                self.counts.errors += 1
                log.warning("document cache: a document is not written: %s", error)
                self._cancel(save)
                return
            save.segment += 1

    def _take(self, document: CachedDocument, start: int, count: int) -> memoryview:
        assert document.key.layer is not None, "prompts read whole are not written to disk"
        segments = [share.segment for share in document.shares]
        return self._copies.take(segments, filter_units(document.key.layer), start, count)

    def _end_save(self, save: FileSave) -> None:
        self._save = None
        if isinstance(save.result, FileInfo):
            self.counts.writes += 1
            self.folder.add(save.result)
        elif save.result is not None:
            self.counts.errors += 1
            log.warning("document cache: nothing more is written to disk: %s", save.result)
            self._is_writing = False

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
