"""One library on disk: a folder that can be copied.

`library.sqlite` has the files, their segments with their texts, and the words; `keys.N` has the
keys of the segments, by which a question finds them. Keys are written and synchronised before the
database says that they are there, so whatever ends a process leaves a whole library, at most with
unused bytes behind its keys. The texts of a file change in one transaction: a question sees a file
as it was or as it is.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gemserve.errors import LibraryBusy, LibraryError, OtherModel
from gemserve_library import word_index
from gemserve_library.identity import Identity
from gemserve_library.keys_file import KeysFile, Records, checksum

log = logging.getLogger("gemserve_library")
DATABASE = "library.sqlite"
_LOCK = "writer.lock"
_REMOVED = ".removed-"  # begins the name of a folder that is being removed; no library's does
_VERSION = "1"
_BUSY_S = 30.0  # that a connection waits for another one's transaction
_MOST_NAMES = 500  # in one statement
_TRIES = 5  # to read an index while its keys are moved together
# what values that no gemserve has written lead to: SQLite does not check types
_DAMAGE = (KeyError, TypeError, ValueError, OverflowError)
_WASTE = 1 << 16  # records of removed segments, below which the file is never written anew
# a row of the table `windows` is a segment
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    num_windows INTEGER NOT NULL, pages TEXT NOT NULL, added_s INTEGER NOT NULL,
    version TEXT NOT NULL
);
CREATE TABLE windows (
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES files, number INTEGER NOT NULL,
    name BLOB NOT NULL, num_tokens INTEGER NOT NULL, start INTEGER NOT NULL, line INTEGER NOT NULL,
    heading TEXT NOT NULL, text TEXT NOT NULL, num_passages INTEGER NOT NULL
);
CREATE INDEX windows_of_file ON windows (file, number);
CREATE INDEX windows_by_name ON windows (name);
CREATE TABLE keys (
    name BLOB PRIMARY KEY, start INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
{word_index.SCHEMA}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """A segment of a file: its text, and where that is.

    `name`: that of `filter_plan.Segment`. `start`: its first character in the file's text. `line`:
    the number of its first line, from 1. `heading`: of what its beginning is part; may be empty.
    """

    name: bytes
    num_tokens: int
    start: int
    line: int
    heading: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """`digest`: of the file's bytes. `pages`: the first character of each page, if it has pages.

    `id`: of this version of the file; set when it is stored, and never used again.
    """

    path: str
    kind: str
    digest: str
    num_bytes: int
    modified_ns: int
    num_tokens: int = 0
    num_windows: int = 0
    pages: tuple[int, ...] = ()
    added_s: int = 0
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """All segments as they are searched, in the order of their keys; all arrays [segments].

    `ids`: of the segments. `files`, `numbers`: which file each is in, and its place there.
    `starts`, `counts`: its records, 0 of them where they are damaged. `sizes`: how many tokens its
    text has. `num_passages`: of all segments together.
    """

    ids: npt.NDArray[np.int64]
    files: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    num_passages: int
    records: Records


class Library:
    """An open library. One thread at a time may use it; many processes may have it open.

    `damaged`: files of which segments' keys are damaged; these segments are found by words alone.
    """

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        """Open the library in `folder`. `identity`: of the model that will use it.

        Raises `LibraryError` if there is none, or it is no library, and `OtherModel`.
        """
        self.folder = folder
        if not (folder / DATABASE).is_file():
            is_other = os.path.lexists(folder / DATABASE)
            problem = (
                f"{DATABASE} is not a file" if is_other else "there is no library in this folder"
            )
            raise LibraryError(f"library {folder.name}: {problem}")
        with ExitStack() as opened:  # whoever is refused must not go on holding SQLite's locks
            with self._told():
                # first: it may be removed, and made anew, while it is opened
                self._inode = (folder / DATABASE).stat().st_ino
                self._connection = sqlite3.connect(
                    folder / DATABASE, timeout=_BUSY_S, check_same_thread=False
                )
            opened.callback(self.close)
            self.identity = self._check(identity)
            opened.pop_all()
        self.damaged: tuple[str, ...] = ()
        self._index: tuple[tuple[int, int], Index] | None = None
        self._checked: set[tuple[int, int]] = set()  # (generation, first record)

    @staticmethod
    def create(folder: Path, identity: Identity) -> Library:
        """Make an empty library. Raises `LibraryError` if there is something in the folder."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _writing(folder):
                if os.path.lexists(folder / DATABASE):
                    raise LibraryError(f"library {folder.name}: exists already")
                _remove_rest(folder)
                # under another name until it is whole, so that nobody opens half of it
                unfinished = folder / f"{DATABASE}.new"
                with closing(sqlite3.connect(unfinished)) as connection:
                    connection.executescript(_SCHEMA)
                    connection.executemany(
                        "INSERT INTO settings VALUES (?, ?)",
                        [
                            ("format", _VERSION),
                            ("identity", identity.to_json()),
                            ("generation", "0"),
                            ("num_records", "0"),
                        ],
                    )
                    connection.commit()
                unfinished.rename(folder / DATABASE)
        except (OSError, sqlite3.Error) as error:
            raise LibraryError(f"library {folder.name}: cannot be made: {error}") from error
        return Library(folder, identity)

    def close(self) -> None:
        self._connection.close()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_there(self) -> bool:
        """Is it still the library in its folder? It may have been deleted, and made anew."""
        try:
            return (self.folder / DATABASE).stat().st_ino == self._inode
        except OSError:
            return False

    @property
    def num_bytes(self) -> int:
        """Of all files in the folder."""
        return size_of(self.folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that changes the library. Raises `LibraryBusy`.

        Raises `LibraryError` if it was removed, and perhaps made anew, since it was opened.
        """
        with _writing(self.folder):
            if not self.is_there:
                raise LibraryError(
                    f"library {self.name}: was removed or made anew meanwhile; open it again"
                )
            yield

    @property
    def speed(self) -> int:
        """Tokens that were read in a second when files were last added; 0 if nobody knows."""
        with self._told():
            found = self._connection.execute("SELECT value FROM settings WHERE name = 'speed'")
            row = found.fetchone()
        return int(row[0]) if row is not None and str(row[0])[:9].isdecimal() else 0

    def note_speed(self, tokens_a_second: int) -> None:
        """Whoever calls it is `writing`."""
        with self._told(), self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO settings VALUES ('speed', ?)", (str(tokens_a_second),)
            )

    def files(self) -> list[StoredFile]:
        """All files, by path."""
        with self._told():
            rows = self._connection.execute(f"SELECT {_FILE_FIELDS} FROM files ORDER BY path")
            return [_file_of(row) for row in rows]

    def file_ids(self) -> frozenset[str]:
        """The `id` of each file."""
        with self._told():
            rows = self._connection.execute("SELECT version FROM files")
            return frozenset(number for (number,) in rows)

    def find_file(self, path: str) -> StoredFile | None:
        with self._told():
            found = self._connection.execute(
                f"SELECT {_FILE_FIELDS} FROM files WHERE path = ?", (path,)
            ).fetchone()
        return None if found is None else _file_of(found)

    def totals(self) -> tuple[int, int, int]:
        """How many files, segments and tokens there are."""
        with self._told():
            files, segments, tokens = self._connection.execute(
                "SELECT count(*), coalesce(sum(num_windows), 0), coalesce(sum(num_tokens), 0) "
                "FROM files"
            ).fetchone()
        return files, segments, tokens

    def known(self, names: Sequence[bytes]) -> set[bytes]:
        """Which of these segments have keys already, whichever file they are in."""
        found: set[bytes] = set()
        with self._told():
            for start in range(0, len(names), _MOST_NAMES):
                part = names[start : start + _MOST_NAMES]
                marks = ",".join("?" * len(part))
                rows = self._connection.execute(
                    f"SELECT name FROM keys WHERE checksum >= 0 AND name IN ({marks})", part
                )
                found |= {name for (name,) in rows}
        return found

    def add_keys(self, segments: Sequence[tuple[bytes, Records]]) -> None:
        """Store the keys of segments that have none yet. Only while `writing`.

        Raises `LibraryError` if the disk is full; then nothing has changed.
        """
        with self._told():
            generation, start = self._end_of_keys()
            self._keys(generation).write(start, np.concatenate([keys for _, keys in segments]))
            with self._connection:
                at = start
                for name, records in segments:
                    row = name, at, len(records), checksum(records)
                    self._connection.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)", row)
                    at += len(records)
                self._set("num_records", at)

    def replace_files(self, files: Sequence[tuple[StoredFile, Sequence[StoredSegment]]]) -> None:
        """Store files, in place of those that had their paths. Only while `writing`.

        All segments must have keys. What is left of replaced files is erased by `clean`.
        """
        with self._told(), self._connection:
            for file, segments in files:
                self._drop_file(file.path)
                self._insert_file(file, segments)

    def touch_file(self, file: StoredFile) -> None:
        """Note when an unchanged file was last written. Only while `writing`."""
        with self._told(), self._connection:
            self._connection.execute(
                "UPDATE files SET modified_ns = ? WHERE path = ?", (file.modified_ns, file.path)
            )

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files, and all that is only of them, from memory and disk. Only while `writing`.

        Nothing of their text is left in the folder.
        """
        with self._told():
            with self._connection:
                for path in paths:
                    self._drop_file(path)
            self.clean()

    @property
    def has_dropped_text(self) -> bool:
        """Is there text on the disk that no file has any more?"""
        (count,) = self._connection.execute(
            "SELECT count(*) FROM settings WHERE name = 'has_dropped'"
        ).fetchone()
        return bool(count)

    def clean(self, *, erases_text: bool = True, is_full: bool = False) -> None:
        """Erase what no file needs, as of changed files. Only while `writing`.

        If it is cut short, the next call goes on: keys in rows without a checksum have to be
        erased, and words and the log of writes if a setting says so. `erases_text`: the latter,
        too, for which the whole index of words is written anew. `is_full`: keys move together
        however little that frees.
        """
        with self._told():
            if erases_text:
                self._erase_dropped_text()
            with self._connection:
                self._connection.execute(
                    "UPDATE keys SET checksum = -1 WHERE name NOT IN (SELECT name FROM windows)"
                )
            unused = self._connection.execute(
                "SELECT start, num_tokens FROM keys WHERE checksum < 0"
            ).fetchall()
            generation, end = self._end_of_keys()
            self._keys(generation).erase([(start, start + count) for start, count in unused])
            with self._connection:
                self._connection.execute("DELETE FROM keys WHERE checksum < 0")
            (used,) = self._connection.execute(
                "SELECT coalesce(sum(num_tokens), 0) FROM keys"
            ).fetchone()
            if end - used > (0 if is_full else max(_WASTE, used)):
                self._move_together(generation)
            self._remove_old_keys()

    def _erase_dropped_text(self) -> None:
        if not self.has_dropped_text:
            return
        with self._connection:
            word_index.forget_removed(self._connection)
        # the log of writes has the old pages, too
        (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not is_busy:
            with self._connection:
                self._connection.execute("DELETE FROM settings WHERE name = 'has_dropped'")

    def index(self) -> Index:
        """All segments, to be searched. Of damaged ones the keys are left out."""
        with self._told():
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            state = version, self._connection.total_changes
            if self._index is None or self._index[0] != state:
                self._index = state, self._read_index()
            return self._index[1]

    def segments(self, ids: Sequence[int]) -> Mapping[int, tuple[StoredFile, StoredSegment]]:
        """The segments with these numbers that are still there, each with its file."""
        found = {}
        with self._told():
            for number in ids:
                # in one statement, because the file may be replaced meanwhile
                row = self._connection.execute(
                    f"SELECT {_SEGMENT_COLUMNS}, {_FILE_COLUMNS} FROM windows "
                    "JOIN files ON file = files.id WHERE windows.id = ?",
                    (int(number),),
                ).fetchone()
                if row is not None:
                    count = len(_SEGMENT_FIELDS)
                    fields = dict(zip(_SEGMENT_FIELDS, row[:count], strict=True))
                    found[int(number)] = _file_of(row[count:]), StoredSegment(**fields)
        return found

    def by_words(self, question: str, num_passages: int) -> dict[int, float]:
        """See `word_index.find_segments`."""
        with self._told():
            return word_index.find_segments(self._connection, question, num_passages)

    def most_by_words(self, question: str, num_passages: int) -> float:
        """See `word_index.most_possible`."""
        with self._told():
            return word_index.most_possible(self._connection, question, num_passages)

    def _read_rows(self) -> tuple[int, npt.NDArray[np.int64]]:
        """The number of the file with the keys, and a row for each segment."""
        self._connection.execute("BEGIN")  # one state of all tables
        try:
            generation, _ = self._end_of_keys()
            rows = self._connection.execute(
                # one whose damaged keys were dropped is still found by its words
                "SELECT windows.id, file, number, coalesce(keys.start, -1), "
                "coalesce(keys.num_tokens, 0), coalesce(checksum, -1), num_passages, "
                "windows.num_tokens "
                "FROM windows LEFT JOIN keys USING (name) ORDER BY keys.start"
            ).fetchall()
        finally:
            self._connection.rollback()
        return generation, np.array(rows, dtype=np.int64).reshape(-1, 8)

    def _read_index(self) -> Index:
        for _ in range(_TRIES):
            generation, table = self._read_rows()
            end = int((table[:, 3] + table[:, 4]).max(initial=0))
            records = self._read_records(generation, end)
            # else a writer has moved the keys into another file meanwhile
            if len(records) == end or self._end_of_keys()[0] == generation:
                break
        is_good = np.array(
            [self._is_whole(generation, records, *map(int, row)) for row in table[:, 3:6]], np.bool_
        )
        self._checked &= {(generation, start) for start in table[:, 3].tolist()}
        counts = np.where(is_good, table[:, 4], 0)
        bad = sorted({int(number) for number in table[~is_good, 1]})
        self.damaged = tuple(
            path
            for number in bad
            for (path,) in self._connection.execute(
                "SELECT path FROM files WHERE id = ?", (number,)
            )
        )
        return Index(
            ids=table[:, 0],
            files=table[:, 1],
            numbers=table[:, 2],
            starts=table[:, 3],
            counts=counts,
            sizes=table[:, 7],
            num_passages=int(table[:, 6].sum()),
            records=records,
        )

    def _read_records(self, generation: int, end: int) -> Records:
        """The first `end` records, or those that there are."""
        keys = self._keys(generation)
        try:
            return keys.read(end)
        except (OSError, ValueError):  # shorter than the database says
            pass
        try:
            return keys.read(keys.path.stat().st_size // keys.dtype.itemsize)
        except OSError:
            return keys.read(0)

    def _is_whole(
        self, generation: int, records: Records, start: int, count: int, expected: int
    ) -> bool:
        """Are a segment's keys what was written? Each is looked at once."""
        if (generation, start) in self._checked:
            return True
        part = records[start : start + count]
        if len(part) != count or checksum(part) != expected:
            return False
        self._checked.add((generation, start))
        return True

    def drop_damaged(self) -> None:
        """Forget the keys of damaged segments: they are read again. Only while `writing`."""
        self.index()
        for path in self.damaged:
            self.drop_damaged_of(path)

    def drop_damaged_of(self, path: str) -> None:
        """Likewise of one file. The keys of others are not looked at. Only while `writing`."""
        with self._told(), self._connection:
            generation, end = self._end_of_keys()
            records = self._read_records(generation, end)
            rows = self._connection.execute(
                "SELECT DISTINCT name, coalesce(keys.start, -1), coalesce(keys.num_tokens, 0), "
                "coalesce(checksum, -1) FROM windows JOIN files ON file = files.id "
                "LEFT JOIN keys USING (name) WHERE path = ?",
                (path,),
            ).fetchall()
            bad = [(name,) for name, *row in rows if not self._is_whole(generation, records, *row)]
            if bad:
                self._connection.executemany("DELETE FROM keys WHERE name = ?", bad)
                self._connection.execute("UPDATE files SET digest = '' WHERE path = ?", (path,))

    def _move_together(self, generation: int) -> None:
        """Write the keys anew without the gaps of removed segments."""
        rows = self._connection.execute(
            "SELECT name, start, num_tokens FROM keys ORDER BY start"
        ).fetchall()
        old, new = self._keys(generation), self._keys(generation + 1)
        records = old.read(max((start + count for _, start, count in rows), default=0))
        *places, end = accumulate((count for *_, count in rows), initial=0)
        try:
            new.write_all(
                (place, np.array(records[start : start + count]))
                for place, (_, start, count) in zip(places, rows, strict=True)
            )
        except OSError as error:  # the gaps stay until there is room
            log.warning("library %s: its keys cannot be moved together: %s", self.name, error)
            new.path.unlink(missing_ok=True)
            return
        with self._connection:
            self._connection.executemany(
                "UPDATE keys SET start = ? WHERE name = ?",
                [(place, name) for place, (name, *_) in zip(places, rows, strict=True)],
            )
            self._set("generation", generation + 1)
            self._set("num_records", end)

    def _remove_old_keys(self) -> None:
        generation, _ = self._end_of_keys()
        for path in self.folder.glob("keys.*"):
            if path.name != f"keys.{generation}":
                path.unlink(missing_ok=True)

    def _insert_file(self, file: StoredFile, segments: Sequence[StoredSegment]) -> None:
        values: list[object] = [
            file.path,
            file.kind,
            file.digest,
            file.num_bytes,
            file.modified_ns,
            sum(segment.num_tokens for segment in segments),
            len(segments),
            json.dumps(file.pages),
            int(time.time()),
            f"lib-{secrets.token_hex(16)}",
        ]
        marks = ", ".join("?" * len(values))
        number = self._connection.execute(
            f"INSERT INTO files ({_FILE_FIELDS}) VALUES ({marks})", values
        ).lastrowid
        for index, segment in enumerate(segments):
            passages = word_index.count_passages(segment.text)
            row = self._connection.execute(
                "INSERT INTO windows (file, number, name, num_tokens, start, line, heading, text, "
                "num_passages) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(number, index, segment.name, segment.num_tokens, segment.start, segment.line),
                    *(segment.heading, segment.text, passages),
                ),
            ).lastrowid
            assert row is not None
            word_index.add_segment(self._connection, row, segment.text)

    def _drop_file(self, path: str) -> None:
        rows = self._connection.execute(
            "SELECT windows.id, text FROM windows JOIN files ON file = files.id WHERE path = ?",
            (path,),
        ).fetchall()
        for number, text in rows:
            word_index.remove_segment(self._connection, number, text)
        self._connection.execute(
            "DELETE FROM windows WHERE file = (SELECT id FROM files WHERE path = ?)", (path,)
        )
        dropped = self._connection.execute("DELETE FROM files WHERE path = ?", (path,))
        if dropped.rowcount:
            self._connection.execute("INSERT OR REPLACE INTO settings VALUES ('has_dropped', '1')")

    def _end_of_keys(self) -> tuple[int, int]:
        """The number of the file with the keys, and how many records it has."""
        settings = dict(
            self._connection.execute(
                "SELECT name, value FROM settings WHERE name IN ('generation', 'num_records')"
            )
        )
        return int(settings["generation"]), int(settings["num_records"])

    def _keys(self, generation: int) -> KeysFile:
        return KeysFile(
            self.folder / f"keys.{generation}", self.identity.num_key_heads, self.identity.head_dim
        )

    def _set(self, name: str, value: int) -> None:
        self._connection.execute("UPDATE settings SET value = ? WHERE name = ?", (str(value), name))

    def _check(self, identity: Identity | None) -> Identity:
        """Set the connection up, and read whose library it is.

        Raises `LibraryError` and `OtherModel`.
        """
        with self._told():
            connection = self._connection
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is gone from disk
            connection.execute("PRAGMA foreign_keys = ON")
            settings = dict(connection.execute("SELECT name, value FROM settings"))
            columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(files)")}
        # the first libraries were of format 1, too, but had no versions of files
        if settings.get("format") != _VERSION or (columns and "version" not in columns):
            raise LibraryError(
                f"library {self.name}: {DATABASE} is of format {settings.get('format')!r} of "
                f"another version of gemserve, and this one reads {_VERSION!r}; read the files "
                "anew: gemserve library add NAME PATH… --anew"
            )
        try:
            own = Identity.of_json(settings["identity"])
        except (KeyError, TypeError, ValueError) as error:
            raise LibraryError(f"library {self.name}: {DATABASE} is damaged: {error}") from error
        if identity is not None and identity.digest != own.digest:
            raise OtherModel(self.name, theirs=own.shown, own=identity.shown)
        return own

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the disk and of the database as those of this library."""
        try:
            yield
        except sqlite3.Error as error:
            raise LibraryError(f"library {self.name}: {DATABASE}: {error}") from error
        except _DAMAGE as error:
            raise LibraryError(f"library {self.name}: {DATABASE} is damaged: {error!r}") from error
        except OSError as error:
            reason = error.strerror or error
            raise LibraryError(f"library {self.name}: {reason}") from error


def size_of(folder: Path) -> int:
    """Bytes of all files in a library's folder. They may come and go meanwhile."""
    size = 0
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                size += path.stat().st_size
    return size


def _remove_rest(folder: Path) -> None:
    """Remove what an unfinished creation or removal has left: SQLite would take it for the new
    library's."""
    ends = ("-wal", "-shm", ".new", ".new-journal")
    for path in [*(folder / f"{DATABASE}{end}" for end in ends), *folder.glob("keys.*")]:
        path.unlink(missing_ok=True)


def remove_library(folder: Path) -> None:
    """Remove a library's folder, even if it is damaged. Raises `LibraryError`, `LibraryBusy`.

    It is gone at once for everybody; what a cut-off removal has left goes with the next one.
    """
    try:
        with _writing(folder):
            folder.rename(folder.with_name(f"{_REMOVED}{secrets.token_hex(8)}"))
    except OSError as error:
        raise LibraryError(f"library {folder.name}: {error}") from error
    sweep(folder.parent)


def sweep(parent: Path) -> None:
    """Remove the folders of removed libraries. Another process may do the same."""
    for folder in parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LibraryError(f"library {folder.name}: {error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LibraryBusy(folder.name) from error
        yield
    finally:
        os.close(lock)


_FILE_FIELDS = (
    "path, kind, digest, num_bytes, modified_ns, num_tokens, num_windows, pages, added_s, version"
)
_FILE_COLUMNS = ", ".join(f"files.{name}" for name in _FILE_FIELDS.split(", "))
_SEGMENT_FIELDS = ("name", "num_tokens", "start", "line", "heading", "text")
_SEGMENT_COLUMNS = ", ".join(f"windows.{name}" for name in _SEGMENT_FIELDS)


def _file_of(row: Sequence[Any]) -> StoredFile:
    fields = dict(zip(_FILE_FIELDS.split(", "), row, strict=True))
    fields["pages"] = tuple(json.loads(fields["pages"]))
    fields["id"] = fields.pop("version")
    return StoredFile(**fields)
