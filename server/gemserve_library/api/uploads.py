"""Files on their way into libraries: each is read in the background, one of a library at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, Literal
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from gemserve.contract.events import Finished
from gemserve.contract.requests import Request
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from gemserve.errors import GemserveError, LibraryBusy, LibraryError, QueueFull, RequestError
from gemserve.holdings import Holdings
from gemserve_library.adding import FileSource, add_files
from gemserve_library.api.shelf import LibraryDiskFull, Shelf

log = logging.getLogger("gemserve.api")
Status = Literal["reading", "ready", "failed"]
_MOST_OF_KEY = 16  # uploads that are not read yet
_AT_ONCE = 4  # files that are read, of as many keys
_REMOVAL_S = 5.0  # that a removal waits for the file that is being read
_TRY_AGAIN_S = 0.5  # after which a full queue is tried again
_REMEMBERED = 64  # failed uploads of a library


@dataclass(slots=True, eq=False, kw_only=True)
class Upload:
    """A file that is being read. `error`: why it has failed. `num_tokens`: read so far.

    `stream`: of the request by which its last part is read.
    """

    path: str
    num_bytes: int
    status: Status = "reading"
    error: str | None = None
    num_tokens: int = 0
    created_s: int = field(default_factory=lambda: int(time.time()))
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    stream: Stream | None = None


class Turn:
    """Who changes a library. Removals come before uploads that wait. For one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._removals: deque[asyncio.Future[None]] = deque()
        self._uploads: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def for_upload(self) -> AsyncIterator[None]:
        await self._enter(self._uploads)
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def for_removal(self, name: str) -> AsyncIterator[None]:
        """Raises `LibraryBusy` if the file that is being read takes too long."""
        try:
            async with asyncio.timeout(_REMOVAL_S):
                await self._enter(self._removals)
        except TimeoutError:
            raise LibraryBusy(name) from None
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, waiting: deque[asyncio.Future[None]]) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        mine = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            await mine
        except BaseException:
            if mine.cancelled():
                with suppress(ValueError):  # whoever has left meanwhile has taken it out
                    waiting.remove(mine)
            else:  # it was given in the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand over. Waits for nothing, because whoever leaves may be cancelled."""
        waiting = self._removals or self._uploads
        while waiting and waiting[0].done():
            waiting.popleft()
            waiting = self._removals or self._uploads
        if waiting:
            waiting.popleft().set_result(None)
        else:
            self._is_taken = False


class Uploads:
    """What is being read into libraries, by tenant and library. For one event loop."""

    def __init__(self, shelf: Shelf, engine: Engine) -> None:
        self._shelf, self._engine = shelf, engine
        self._of: dict[tuple[bytes, str], list[Upload]] = {}
        self._coming = Holdings()  # files that are not listed yet
        self._turns: WeakValueDictionary[tuple[bytes, str], Turn] = WeakValueDictionary()
        self._of_keys: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limiter = CapacityLimiter(_AT_ONCE)

    def list(self, tenant: bytes, name: str) -> list[Upload]:
        """Those that are being read, and those that failed last."""
        return list(self._of.get((tenant, name), ()))

    def num_bytes(self, tenant: bytes) -> int:
        """Of this key's files that are not read yet."""
        return sum(upload.num_bytes for upload in self._unread(tenant))

    def _unread(self, tenant: bytes) -> Sequence[Upload]:
        return [
            upload
            for (owner, _), uploads in self._of.items()
            if owner == tenant
            for upload in uploads
            if upload.status == "reading"
        ]

    def check_room(self, tenant: bytes) -> None:
        """Raise `RequestError` if this key must wait for its other uploads."""
        count = len(self._unread(tenant)) + self._coming.of(tenant)
        if count >= _MOST_OF_KEY:
            raise RequestError(
                f"file: {count} files of this key are being read, the limit is "
                f"{_MOST_OF_KEY}; wait until one is ready",
                param="file",
                code="too_many_uploads",
            )

    @contextmanager
    def one_more(self, tenant: bytes) -> Iterator[None]:
        """A file of this key is on its way here. Raises as `check_room` does."""
        self.check_room(tenant)
        with self._coming.one_more(tenant):
            yield

    def begin(
        self,
        tenant: bytes,
        name: str,
        path: str,
        num_bytes: int,
        content: BinaryIO,
        charge: Callable[[int], None],
        end: Callable[[], None],
    ) -> Upload:
        """Read a file into a library. `charge` counts its tokens; `end` is called at last.

        `content`: of so many bytes, from its beginning; it is closed.
        """
        upload = Upload(path=path, num_bytes=num_bytes)
        uploads = self._of.setdefault((tenant, name), [])
        uploads[:] = [each for each in uploads if each.path != path or each.status == "reading"]
        uploads.append(upload)
        task = asyncio.create_task(self._read(tenant, name, upload, content, charge, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return upload

    def cancel(self, tenant: bytes, name: str, path: str | None = None) -> bool:
        """End what is being read of a library, or of one of its files. Was there any?"""
        found = [each for each in self.list(tenant, name) if path is None or each.path == path]
        for upload in found:
            upload.is_cancelled.set()
            if upload.stream is not None:  # it may wait for its turn for long
                upload.stream.cancel()
            self._remove(tenant, name, upload)
        return bool(found)

    def _remove(self, tenant: bytes, name: str, upload: Upload) -> None:
        """List an upload no more. Idempotent."""
        left = list(self._others(tenant, name, upload))
        if left:
            self._of[tenant, name] = left
        else:
            self._of.pop((tenant, name), None)

    def turn(self, tenant: bytes, name: str) -> Turn:
        """Whoever has it is the only one of this server that changes the library."""
        return self._turns.setdefault((tenant, name), Turn())

    async def _read(
        self,
        tenant: bytes,
        name: str,
        upload: Upload,
        content: BinaryIO,
        charge: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        key = tenant, name
        # of a key one at a time, so that others' need not wait for all of its files
        own_turn = self._of_keys.setdefault(tenant, asyncio.Lock())
        try:
            async with own_turn, self.turn(*key).for_upload():
                loop = asyncio.get_running_loop()

                def run(request: Request) -> Finished:
                    own = replace(request, tenant=tenant)
                    work = self._run(own, charge, upload)
                    return asyncio.run_coroutine_threadsafe(work, loop).result()

                def charge_known(count: int) -> None:
                    loop.call_soon_threadsafe(charge, count)

                add = partial(self._add, tenant, name, upload, content, run, charge_known)
                try:
                    await to_thread.run_sync(add, limiter=self._limiter)
                finally:
                    if not any(each.status == "reading" for each in self._others(*key, upload)):
                        await to_thread.run_sync(self._erase, *key, limiter=self._limiter)
            upload.status = "ready"
            self._remove(*key, upload)
        except GemserveError as error:
            upload.status, upload.error = "failed", str(error)
        except Exception as error:
            upload.status, upload.error = "failed", f"{type(error).__name__}: {error}"
            log.exception("a file could not be read into a library")
        finally:
            content.close()
            failed = [each for each in self.list(*key) if each.status == "failed"]
            for old in failed[:-_REMEMBERED]:
                self._remove(*key, old)
            upload.is_settled.set()
            end()

    def _others(self, tenant: bytes, name: str, upload: Upload) -> Sequence[Upload]:
        return [each for each in self.list(tenant, name) if each is not upload]

    def _erase(self, tenant: bytes, name: str) -> None:
        """Erase the text of replaced files, once for all that were uploaded together."""
        with suppress(GemserveError), closing(self._shelf.open(tenant, name)) as library:
            if library.has_dropped_text:
                with library.writing():
                    library.clean()

    def _add(
        self,
        tenant: bytes,
        name: str,
        upload: Upload,
        content: BinaryIO,
        run: Callable[[Request], Finished],
        charge_known: Callable[[int], object],
    ) -> None:
        """Read the file, in a thread. Raises `GemserveError` if that fails.

        `charge_known` counts tokens that are not read again, but are cut and compared.
        """
        _check(upload)
        library = self._shelf.open(tenant, name)
        try:
            before, num_known = library.find_file(upload.path), 0
            source = FileSource(upload.path, content.read)
            # closed at once, so that whoever cancelled it finds nobody writing
            requests, tokenizer = self._shelf.requests, self._shelf.tokenizer
            with closing(
                add_files(
                    *(library, requests, tokenizer, run, [source]),
                    erases_text=False,
                    checks_all=False,
                )
            ) as adding:
                for added in adding:
                    upload.num_tokens = added.read_tokens
                    charge_known(added.known_tokens - num_known)
                    num_known = added.known_tokens
                    _check(upload)
                    # what is stored, or left out, is no reason to end
                    if not (added.files or added.unchanged or added.skipped):
                        self._shelf.check_size(tenant)
            if added.skipped:
                raise LibraryError(added.skipped[0][1])
            if upload.is_cancelled.is_set():
                with library.writing():
                    library.remove_files([upload.path])
            after = library.find_file(upload.path)
        except LibraryDiskFull:
            with library.writing():
                library.clean(is_full=True)  # of what was read of the file
            raise
        finally:
            library.close()
        if before is not None and (after is None or after.id != before.id):
            self._shelf.forget_files([before.id])

    async def _run(
        self, request: Request, charge: Callable[[int], None], upload: Upload
    ) -> Finished:
        """Run a request of the engine, after others if the queue is full."""
        while True:
            _check(upload)
            try:
                stream = upload.stream = self._engine.submit(request)
                break
            except QueueFull:
                await asyncio.sleep(_TRY_AGAIN_S)
        charge(len(request.prompt_ids))
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    return event
        finally:
            stream.cancel()
            upload.stream = None
        raise AssertionError("a stream has a last event")


def _check(upload: Upload) -> None:
    if upload.is_cancelled.is_set():
        raise LibraryError("the file was removed before it was read")
