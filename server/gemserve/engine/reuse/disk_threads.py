"""Reads and writes files of the document cache beside the engine's thread.

Each direction has a thread of its own, so that a prompt that waits for its file does not wait for
others to be written. Memory passes between the threads in blocks, at most `_AHEAD` at a time.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue, SimpleQueue

from gemserve.engine.cache.document_cache import CachedDocument
from gemserve.engine.cache.files import FileInfo, FileWriter, open_plain, read_block

_AHEAD = 2  # blocks


@dataclass(slots=True, eq=False, kw_only=True)
class FileLoad:
    """A file whose first `num_tokens` tokens are read, from `block` on.

    The reader puts the blocks into `ready`, and after the last one None, or what went wrong.
    `taken_s`: how long it has read, set before that.
    """

    info: FileInfo
    num_tokens: int
    block: int = 0
    taken_s: float = 0.0
    num_bytes: int = 0
    ready: Queue[bytearray | Exception | None] = field(default_factory=lambda: Queue(_AHEAD))
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class FileSave:
    """A document that is written to a file, `block` being the next one.

    `result`: the complete file, or what went wrong. It is set under `lock`: after `is_cancelled`
    was set, a file that got its name is removed again. The engine takes the lock, so nothing that
    waits for the disk belongs under it.
    """

    document: CachedDocument
    info: FileInfo
    block: int = 0
    given: Queue[memoryview | None] = field(default_factory=lambda: Queue(_AHEAD))
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False
    is_over: bool = False
    result: FileInfo | Exception | None = None


class CacheThreads:
    """`changed` is set when a thread has done something that the engine may wait for.

    `is_reading`: a file is being read.
    """

    def __init__(self, key: bytes) -> None:
        self.changed = threading.Event()
        self.is_reading = False
        self._key = key
        self._loads: SimpleQueue[FileLoad | None] = SimpleQueue()
        self._saves: SimpleQueue[FileSave | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"gemserve-cache-{name}", daemon=True)
            for name, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, load: FileLoad) -> None:
        self._loads.put(load)

    def save(self, save: FileSave) -> None:
        self._saves.put(save)

    def close(self) -> None:
        """End both threads. What is under way must have been cancelled. Idempotent."""
        self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join(5)

    def _read(self) -> None:
        while (load := self._loads.get()) is not None:
            if not load.is_cancelled:
                self._read_file(load)
            del load  # it holds a request, whose adapter counts as in use

    def _read_file(self, load: FileLoad) -> None:
        end: Exception | None = None
        started_s = time.perf_counter()
        self.is_reading = True
        try:
            with open(load.info.path, "rb", opener=open_plain) as file:
                for block in range(load.block, load.info.num_blocks):
                    if load.info.tokens_of(block)[0] >= load.num_tokens:
                        break
                    if not self._hand_over(load, read_block(file, load.info, block)):
                        break
        except Exception as error:
            end = error.with_traceback(None)  # which would hold the load
        load.taken_s = time.perf_counter() - started_s
        self.is_reading = False
        self._hand_over(load, end)

    def _hand_over(self, load: FileLoad, item: bytearray | Exception | None) -> bool:
        """False: nobody waits for the file any more."""
        while not load.is_cancelled:
            with suppress(Full):
                load.ready.put(item, timeout=0.1)
                self.changed.set()
                return True
        return False

    def _write(self) -> None:
        while (save := self._saves.get()) is not None:
            writer: FileWriter | None = None
            try:
                if save.is_cancelled:
                    continue
                writer = FileWriter(save.info, self._key)
                for _ in range(save.info.num_blocks):
                    data = self._take(save)
                    if data is None:
                        break
                    writer.add(data)
                else:
                    writer.finish()
                written = None if save.is_cancelled else writer.publish()
                with save.lock:
                    if is_wanted := not save.is_cancelled:
                        save.result = written
                if written is not None and not is_wanted:
                    written.path.unlink()
                writer.settle()
            except Exception as error:
                with save.lock:
                    save.result = error
            if writer is not None:
                writer.abort()
            save.is_over = True
            self.changed.set()

    def _take(self, save: FileSave) -> memoryview | None:
        """The next block; None: the document is no longer wanted."""
        while not save.is_cancelled:
            with suppress(Empty):
                data = save.given.get(timeout=0.1)
                self.changed.set()
                return data
        return None
