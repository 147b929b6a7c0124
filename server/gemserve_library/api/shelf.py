"""The libraries of all keys, on disk. Nobody finds a library of another key.

The methods without `async` block, so they are called in threads.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from gemserve.api.serving import Serving
from gemserve.config import ServerConfig
from gemserve.contract.events import Finished
from gemserve.contract.requests import Request
from gemserve.errors import ConfigError, LibraryError, LibraryNotFound, OtherModel, RequestError
from gemserve.files.file_text import NoText, is_packed, unpacked
from gemserve.prompting.answerable import Answerable
from gemserve.prompting.stopping import check_stopped
from gemserve_library.asking import find_excerpts
from gemserve_library.folders import folder_of, holds_library, names_in
from gemserve_library.library import Index, Library, remove_library, size_of, sweep
from gemserve_library.vectors import NO_HEADS, VectorRequests, vector_requests

_OF_KEYS = ".keys"  # a name that no library can have
_MOST_OPEN = 32  # libraries, each with a connection and a map of its keys
_MOST_FILES = 100_000  # of libraries that are closed, of which it is known that they were searched


class LibraryDiskFull(LibraryError):
    """The libraries of a key are larger than they may be."""


@dataclass(slots=True, eq=False)
class OpenLibrary:
    """A library for searches, one at a time. `is_gone`: it was deleted.

    `index`: what was searched last, of the files with the `file_ids`.
    """

    library: Library
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_gone: bool = False
    index: Index | None = None
    file_ids: frozenset[str] = frozenset()

    def gone_files(self) -> list[str]:
        """The files that were there at the last search, and are no more."""
        index = self.library.index()
        if index is self.index:
            return []
        before, self.file_ids = self.file_ids, self.library.file_ids()
        self.index = index
        return list(before - self.file_ids)

    def close(self) -> None:
        with self.lock:  # a search that is under way ends first
            self.is_gone = True
            self.library.close()


class Shelf:
    """The libraries in one folder, which belong to one model. Any thread may call the methods."""

    def __init__(
        self,
        root: Path,
        requests: VectorRequests,
        tokenizer: Any,
        config: ServerConfig,
        forget: Callable[[Sequence[str]], Future[None]],
    ) -> None:
        """`forget` has the document cache drop what it holds of these files."""
        self.requests, self.tokenizer = requests, tokenizer
        self._root, self._config, self._forget = root, config, forget
        self._open: dict[tuple[bytes, str], OpenLibrary] = {}  # that was used last is the last one
        # the files of those that were closed for others: the cache may still have what was read
        self._closed: dict[tuple[bytes, str], frozenset[str]] = {}  # closed last is the last one
        self._lock = threading.Lock()
        for parent in (root, *(root / _OF_KEYS).glob("*")):
            sweep(parent)

    def names(self, tenant: bytes) -> list[str]:
        return names_in(self._parent(tenant))

    def create(self, tenant: bytes, name: str) -> None:
        """Raises `RequestError` if there is one, or the key has as many as it may have."""
        folder = folder_of(name, self._parent(tenant))
        held = self.names(tenant)
        if name in held:
            raise RequestError(
                f"name={name}: this key has a library of this name", param="name", code="exists"
            )
        if len(held) >= self._config.max_libraries:
            raise RequestError(
                f"libraries: this key has {len(held)}, the limit is {self._config.max_libraries} "
                "(--max-libraries); delete one first",
                param=None,
                code="too_many_libraries",
            )
        Library.create(folder, self.requests.identity).close()

    def open(self, tenant: bytes, name: str, *, param: str = "name") -> Library:
        """A library for one thread, which closes it. Raises `LibraryNotFound`, `LibraryError`."""
        return Library(self._folder(tenant, name, param), self.requests.identity)

    def describe(self, tenant: bytes, name: str) -> Description:
        """Raises `LibraryNotFound`. One that cannot be used has an `error`."""
        folder = self._folder(tenant, name, "name")
        try:
            library = Library(folder)
        except LibraryError as error:
            return Description(name=name, error=str(error))
        try:
            files, segments, tokens = library.totals()
            own = self.requests.identity
            reason = None
            if library.identity.digest != own.digest:
                reason = str(OtherModel(name, theirs=library.identity.shown, own=own.shown))
            return Description(
                name=name,
                files=files,
                segments=segments,
                tokens=tokens,
                num_bytes=library.num_bytes,
                model=library.identity.model,
                error=reason,
            )
        except LibraryError as error:
            return Description(name=name, error=str(error))
        finally:
            library.close()

    def hold(self, path: str, content: bytes) -> tuple[int, BinaryIO]:
        """The content of a file that will be added, unpacked and on disk, because it may wait long.

        Raises `RequestError` or `LibraryError`.
        """
        try:
            if is_packed(path):
                content = unpacked(content, self._config.max_body_bytes)
            self._root.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:
                held = opened.enter_context(TemporaryFile(dir=self._root))
                held.write(content)
                held.seek(0)
                opened.pop_all()  # it is closed when it has been read
        except NoText as error:
            raise RequestError(f"file: {error}", param="file") from error
        except OSError as error:
            reason = error.strerror or error
            raise LibraryError(f"the file cannot be kept until it is read: {reason}") from error
        return len(content), held

    def check_there(self, tenant: bytes, name: str) -> None:
        """Raise `LibraryNotFound` if there is no library of this name, not even a damaged one."""
        self._folder(tenant, name, "name")

    def delete(self, tenant: bytes, name: str) -> None:
        """Remove a library from disk and from the document cache. Raises `LibraryNotFound`."""
        folder = self._folder(tenant, name, "name")
        try:
            with closing(Library(folder)) as library:
                ids = list(library.file_ids())
        except LibraryError:  # damaged, or of another version: nobody can have asked it
            ids = []
        remove_library(folder)
        self._forget(ids).result()
        self._drop(tenant, name)

    def remove_file(self, tenant: bytes, name: str, path: str, was_read: bool) -> bool:
        """Remove a file likewise. False: there is none. Raises `LibraryNotFound`, `LibraryBusy`.

        `was_read`: reading it was just ended, so that there may be a part of it.
        """
        library = self.open(tenant, name)
        try:
            with library.writing():
                file = library.find_file(path)
                if file is None:
                    if was_read:
                        library.clean()
                    return False
                try:
                    library.remove_files([path])
                finally:  # it may be gone, although not all of it could be erased
                    self.forget_files([file.id])
        finally:
            library.close()
        return True

    def forget_files(self, ids: Sequence[str]) -> None:
        """Have the document cache drop what it holds of files that were changed."""
        if ids:
            self._forget(ids).result()

    def check_room(self, tenant: bytes, num_bytes: int) -> None:
        """Raise `RequestError` if the key's libraries may not grow by files of so many bytes."""
        used, limit = self._used_bytes(tenant), self._config.library_disk_bytes
        # a token of about four bytes has keys of a hundred bytes or more
        identity = self.requests.identity
        of_token = identity.num_key_heads * (identity.head_dim + 2)
        needed = num_bytes * (2 + of_token // 4)
        if used + needed > limit:
            raise RequestError(
                f"file: needs about {needed} bytes, with files that are not read yet; this key's "
                f"libraries have {used} of the {limit} that they may have",
                param="file",
                code="library_disk_full",
            )

    def check_size(self, tenant: bytes) -> None:
        """Raise `LibraryDiskFull` if the key's libraries are larger than they may be."""
        used, limit = self._used_bytes(tenant), self._config.library_disk_bytes
        if used > limit:
            raise LibraryDiskFull(
                f"the file needs too much: with it this key's libraries have {used} bytes, and may "
                f"have {limit}"
            )

    def _used_bytes(self, tenant: bytes) -> int:
        parent = self._parent(tenant)
        return sum(size_of(parent / name) for name in names_in(parent))

    def find(
        self,
        tenant: bytes,
        names: Sequence[str],
        request: Request,
        finished: Finished,
        candidates: int,
    ) -> Answerable:
        """What libraries have of a request's question: see `find_excerpts`.

        Raises `Stopped` if the client has left before it begins.
        """
        while True:
            opened = {name: self._opened(tenant, name) for name in names}
            with ExitStack() as held:
                # in one order for everybody, or two requests could wait for each other
                for _, each in sorted(opened.items()):
                    held.enter_context(each.lock)
                check_stopped()  # it may have waited for long
                if any(each.is_gone for each in opened.values()):
                    continue  # it was closed meanwhile; if it was deleted, it is not found now
                for each in opened.values():  # another process may have removed files
                    self.forget_files(each.gone_files())
                libraries = [each.library for each in opened.values()]
                return find_excerpts(
                    libraries, names, request, finished, self.requests, self.tokenizer, candidates
                )

    def close(self) -> None:
        """Close all libraries. No search is under way any more."""
        with self._lock:
            opened = list(self._open.values())
            self._open.clear()
        for each in opened:
            each.close()

    def check_names(
        self, tenant: bytes, names: Sequence[str], param: str = "filter.library"
    ) -> None:
        """Raise `LibraryNotFound` or `LibraryError` if one of them cannot be searched."""
        for name in names:
            self._opened(tenant, name, param)

    def _opened(self, tenant: bytes, name: str, param: str = "filter.library") -> OpenLibrary:
        with self._lock:
            found = self._open.pop((tenant, name), None)
            if found is not None and found.library.is_there:
                self._open[tenant, name] = found  # as the last one
                return found
        if found is not None:  # another process has removed it, or made it anew
            self._end(found)
        folder = self._folder(tenant, name, param)
        with self._lock:
            opened = self._open.get((tenant, name))
            if opened is None:
                opened = OpenLibrary(Library(folder, self.requests.identity))
                # whatever another process removes meanwhile, the next search finds gone
                opened.file_ids = self._closed.pop((tenant, name), frozenset())
                self._open[tenant, name] = opened
        self._close_oldest()
        return opened

    def _close_oldest(self) -> None:
        """Close what too many are open for. The cache keeps what it has of them."""
        with self._lock:
            if len(self._open) <= _MOST_OPEN:
                return
            key = next(iter(self._open))
            oldest = self._open.pop(key)
        oldest.close()
        gone: list[str] = []
        with self._lock:
            if key in self._open:  # it was opened meanwhile
                self._open[key].file_ids |= oldest.file_ids
                return
            self._closed[key] = oldest.file_ids
            while len(self._closed) > 1 and sum(map(len, self._closed.values())) > _MOST_FILES:
                gone += self._closed.pop(next(iter(self._closed)))
        self.forget_files(gone)

    def _drop(self, tenant: bytes, name: str) -> None:
        with self._lock:
            opened = self._open.pop((tenant, name), None)
            closed = self._closed.pop((tenant, name), frozenset())
        if opened is not None:
            self._end(opened)
        self.forget_files(list(closed))

    def _end(self, opened: OpenLibrary) -> None:
        """Close a library that is gone, and have the document cache drop what it holds of it."""
        opened.close()
        self.forget_files(list(opened.file_ids))

    def _folder(self, tenant: bytes, name: str, param: str) -> Path:
        try:
            folder = folder_of(name, self._parent(tenant))
        except LibraryError:
            raise LibraryNotFound(name, param=param) from None
        if not holds_library(folder):
            raise LibraryNotFound(name, param=param)
        return folder

    def _parent(self, tenant: bytes) -> Path:
        """The folder of a key's libraries; without keys that of `gemserve library`."""
        if not tenant:
            return self._root
        return self._root / _OF_KEYS / hashlib.sha256(tenant).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """`error`: why it cannot be used, if it cannot."""

    name: str
    files: int = 0
    segments: int = 0
    tokens: int = 0
    num_bytes: int = 0
    model: str | None = None
    error: str | None = None


def shelf_of(serving: Serving) -> Shelf | None:
    """The libraries of the server, if it has any. Raises `ConfigError`."""
    config = serving.config
    if config.library_dir is None:
        return None
    assert serving.core is not None
    requests = vector_requests(serving.core, serving.model_name)
    if requests is None:
        raise ConfigError(
            f"library_dir={config.library_dir}: {NO_HEADS}"
            + (", or use --calibrate auto" if serving.engine.has_idle_work else "")
        )
    forget = serving.engine.forget_documents
    return Shelf(Path(config.library_dir), requests, serving.builder.tokenizer, config, forget)
