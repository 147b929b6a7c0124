"""Adds files to a library: reads what is new of them, and stores it as it comes.

What was stored stays, whatever ends the work: the same call goes on where the last one has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from gemserve.contract.filter_plan import GROUP_TOKENS
from gemserve.errors import RequestError, shown
from gemserve.files.file_text import (
    FileText,
    NoText,
    Unreadable,
    digest_of,
    read_bytes,
    text_of,
)
from gemserve_library.cutting import CutSegment, cut_file
from gemserve_library.keys_file import rounded_keys
from gemserve_library.library import Library, StoredFile
from gemserve_library.vectors import Run, VectorRequests, keys_of

log = logging.getLogger("gemserve_library")
_NAMED = 10  # files in a message
_FILES_AT_ONCE = 256  # that are stored in one transaction at most


@dataclass(slots=True)
class Added:
    """What has been done so far. `skipped`: the files that were left out, each with the reason."""

    files: int = 0
    unchanged: int = 0
    read_tokens: int = 0
    known_tokens: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    at: str = ""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file to add. `load`: its bytes; raises `NoText`. `modified_ns`: -1 if nobody knows."""

    path: str
    load: Callable[[], bytes]
    num_bytes: int = -1
    modified_ns: int = -1

    @staticmethod
    def of_file(path: Path) -> FileSource:
        try:
            stat = path.stat()
        except OSError:
            return FileSource(str(path), lambda: read_bytes(path))
        if not S_ISREG(stat.st_mode):  # a pipe would be waited for
            return FileSource(str(path), _no_file)
        return FileSource(str(path), lambda: read_bytes(path), stat.st_size, stat.st_mtime_ns)


def _no_file() -> bytes:
    raise Unreadable("is no file")


@dataclass(slots=True, eq=False)
class _Pending:
    """A file of which segments are not stored yet."""

    file: StoredFile
    segments: list[CutSegment] = field(default_factory=list)
    is_whole: bool = False


class Adder:
    """Adds files to a library that is being written. `run`: runs a request of the engine."""

    def __init__(
        self, library: Library, requests: VectorRequests, tokenizer: Any, run: Run
    ) -> None:
        self._library, self._requests = library, requests
        self._tokenizer, self._run = tokenizer, run
        self._unread: dict[bytes, CutSegment] = {}
        self._pending: list[_Pending] = []
        self._outdated: list[str] = []  # files that now have something that cannot be added
        self.added = Added()

    def add(self, sources: Iterable[FileSource]) -> Iterator[Added]:
        """Add all, and yield what has been done so far, again and again.

        A file that is as it was when it was added is not read again, and of a changed one only the
        segments that nobody has. What was stored of a file on disk is removed if it has changed
        into something that cannot be added. Raises `LibraryError`.
        """
        for source in sources:
            self.added.at = source.path
            try:
                yield from self._add(source)
            # the latter: a text whose tokens depend on where it begins
            except (NoText, RequestError) as error:
                self._skip(source, error)
        if self._unread:
            self._read()
        self._store()
        if self._outdated:
            self._library.remove_files(self._outdated)
        yield self.added

    def _skip(self, source: FileSource, error: NoText | RequestError) -> None:
        self._pending = [pending for pending in self._pending if pending.is_whole]
        reason = str(error)
        is_on_disk = source.modified_ns >= 0 and not isinstance(error, Unreadable)
        if is_on_disk and self._library.find_file(source.path) is not None:
            self._outdated.append(source.path)
            reason += "; what it had before is removed"
        self.added.skipped.append((source.path, reason))

    def _add(self, source: FileSource) -> Iterator[Added]:
        try:
            source.path.encode()
        except UnicodeEncodeError:
            raise Unreadable("has a name that is not UTF-8") from None
        known = self._library.find_file(source.path)
        if known is not None and known.digest and source.modified_ns >= 0:
            same = known.num_bytes, known.modified_ns
            if same == (source.num_bytes, source.modified_ns):
                self.added.unchanged += 1
                return
        content = source.load()
        file = StoredFile(
            path=source.path,
            kind="text",
            digest=digest_of(content),
            num_bytes=len(content),
            modified_ns=source.modified_ns,
        )
        if known is not None and known.digest == file.digest:
            self._library.touch_file(file)
            self.added.unchanged += 1
            return
        text = text_of(content, source.path)
        del content
        yield from self._cut(replace(file, kind=text.kind, pages=text.pages), text)

    def _cut(self, file: StoredFile, text: FileText) -> Iterator[Added]:
        identity = self._requests.identity
        pending = _Pending(file)
        self._pending.append(pending)
        for cut in cut_file(self._tokenizer, text, identity.anchor, identity.window):
            pending.segments.append(replace(cut, tokens=cut.tokens[:0]))
            if cut.segment.name in self._unread or self._library.known([cut.segment.name]):
                self.added.known_tokens += cut.segment.num_tokens
                yield self.added  # millions of such tokens take minutes
                continue
            num_unread = sum(len(each.tokens) for each in self._unread.values())
            if self._unread and num_unread + len(cut.tokens) > GROUP_TOKENS:
                self._read()
                yield self.added
            self._unread[cut.segment.name] = cut
        pending.is_whole = True
        if not pending.segments:
            raise NoText("has no words")
        if len(self._pending) >= _FILES_AT_ONCE:
            if self._unread:
                self._read()
            self._store()
            yield self.added

    def _read(self) -> None:
        """Read the segments that nobody has, and store their keys."""
        segments = list(self._unread.values())
        request = self._requests.for_keys([each.tokens for each in segments])
        keys = keys_of(self._run(request)).segments
        self._library.add_keys(
            [(each.segment.name, rounded_keys(of)) for each, of in zip(segments, keys, strict=True)]
        )
        self.added.read_tokens += sum(len(each.tokens) for each in segments)
        self._unread.clear()
        self._store()

    def _store(self) -> None:
        """Store the files of which all segments have keys."""
        whole = [
            pending
            for pending in self._pending
            if pending.is_whole
            and not any(each.segment.name in self._unread for each in pending.segments)
        ]
        if not whole:
            return
        self._library.replace_files(
            [(each.file, [cut.segment for cut in each.segments]) for each in whole]
        )
        self._pending = [pending for pending in self._pending if pending not in whole]
        self.added.files += len(whole)


def add_files(
    library: Library,
    requests: VectorRequests,
    tokenizer: Any,
    run: Run,
    sources: Iterable[FileSource],
    *,
    erases_text: bool = True,
    checks_all: bool = True,
) -> Generator[Added, None, None]:
    """Be the only writer, add all files, and erase what no file needs any more.

    `erases_text`: see `Library.clean`. `checks_all`: look for damage in all keys of the library,
    and not in those of the `sources` alone.

    Raises `LibraryBusy`, and `LibraryError` if the disk is full: what was stored before stays.
    """
    with library.writing():
        if checks_all:
            _drop_damaged(library)
        else:
            sources = list(sources)
            for source in sources:
                library.drop_damaged_of(source.path)
        yield from Adder(library, requests, tokenizer, run).add(sources)
        library.clean(erases_text=erases_text)


def _drop_damaged(library: Library) -> None:
    library.index()
    if library.damaged:
        log.warning(
            "the keys of %d files are damaged; they are read anew when the files are added "
            "again: %s",
            len(library.damaged),
            ", ".join(map(shown, library.damaged[:_NAMED])),
        )
        library.drop_damaged()
