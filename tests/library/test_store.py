"""A library's folder: what is stored is found again, and nothing half done is believed."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemserve.errors import LibraryBusy, LibraryError, OtherModel
from gemserve_library.adding import add_files
from gemserve_library.keys_file import KeysFile, checksum, rounded_keys
from gemserve_library.library import DATABASE, Library, remove_library
from tests.library.worlds import (
    IDENTITY,
    FakeReader,
    FakeRequests,
    add,
    open_library,
    paragraphs,
    text_source,
)
from tests.samples.make_samples import SAMPLES

SECRET = "zanzibarcode"


def test_rounded_keys_are_near_the_keys() -> None:
    """A scale in half precision that was rounded down would cut off the largest numbers."""
    keys = np.random.default_rng(0).normal(size=(3, 50, 64)).astype(np.float32) * 40
    records = rounded_keys(keys)
    again = records["keys"].astype(np.float32) * records["scale"].astype(np.float32)[..., None]
    error = np.abs(again.transpose(1, 0, 2) - keys)
    assert (error <= np.abs(keys).max(axis=2, keepdims=True) / 127 * 0.51).all()
    assert not rounded_keys(np.zeros((1, 4, 8), np.float32))["keys"].any()


def test_a_copied_folder_is_a_library(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(60))])
    library.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = open_library(tmp_path / "b")
    assert [file.path for file in copy.files()] == ["x"]
    assert copy.index().counts.min() > 0
    assert not copy.damaged


def test_another_model_is_named(tmp_path: Path) -> None:
    open_library(tmp_path / "a").close()
    other = replace(IDENTITY, model="other", weights="fedcba9876543210")
    with pytest.raises(OtherModel, match=r"was read by fake .*this is other .*--anew"):
        Library(tmp_path / "a", other)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 99])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / DATABASE).write_bytes(content)
    with pytest.raises(LibraryError, match=f"library a: {DATABASE}"):
        Library(tmp_path / "a", IDENTITY)


def unpacked_sample(name: str, folder: Path) -> Path:
    """A library as another version has left it, see `tests/samples/make_samples.py`."""
    folder.mkdir()
    for path in (SAMPLES / "library" / name).iterdir():
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return folder


def test_what_this_version_has_written_is_a_library(tmp_path: Path) -> None:
    library = open_library(unpacked_sample("present", tmp_path / "a"))
    assert [file.path for file in library.files()] == ["ferry.txt"]
    assert library.by_words("ferry", library.index().num_passages)
    assert library.index().counts.tolist() != [0]
    assert not library.damaged


@pytest.mark.parametrize(
    ("name", "its_format"), [("newer", "'99'"), ("without_versions", "'1' of another")]
)
def test_a_library_of_another_version_is_refused(
    name: str, its_format: str, tmp_path: Path
) -> None:
    """One without a column was opened, and failed at the first question by SQLite's words."""
    folder = unpacked_sample(name, tmp_path / "a")
    with pytest.raises(LibraryError) as refused:
        Library(folder, IDENTITY)
    told = str(refused.value)
    assert told.startswith(f"library a: {DATABASE} is of format {its_format}")
    assert re.search(
        r"this one reads '1'; read the files anew: .* library add NAME PATH… --anew", told
    )
    remove_library(folder)  # as --anew does
    assert open_library(folder).files() == []


def test_whoever_is_refused_holds_no_lock(tmp_path: Path) -> None:
    """A connection that an error kept alive once had others wait for half a minute."""
    library = open_library(tmp_path / "a")
    library.close()
    with closing(sqlite3.connect(tmp_path / "a" / DATABASE)) as connection:
        connection.execute("UPDATE settings SET value = 'other' WHERE name = 'format'")
        connection.commit()
    with pytest.raises(LibraryError, match="is of format 'other'") as refused:
        Library(tmp_path / "a", IDENTITY)
    with closing(sqlite3.connect(tmp_path / "a" / DATABASE, timeout=0)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")  # no other connection is left
    assert refused.tb is not None


def test_a_database_that_is_cut_off_is_refused_when_it_is_opened(
    tmp_path: Path, tokenizer: Any
) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(60))])
    open_library(tmp_path / "a").close()  # what is not in the file yet is not missing
    library.close()
    database = tmp_path / "a" / DATABASE
    os.truncate(database, database.stat().st_size - 4096)
    with pytest.raises(LibraryError, match=f"library a: {DATABASE}: .*malformed"):
        Library(tmp_path / "a", IDENTITY)


def test_damaged_segments_are_found_by_words_until_their_file_is_added_again(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Adding another file dropped damaged keys, and with them the segments from all searches."""
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("bad", f"{paragraphs(20)}\n\n{SECRET}")])
    library.close()
    keys = tmp_path / "a" / "keys.0"
    keys.write_bytes(bytes(keys.stat().st_size))
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("good", paragraphs(20, "good"))])
    assert library.damaged == ("bad",)
    index = library.index()
    assert len(index.ids) > (index.counts > 0).sum() > 0
    found = library.by_words(SECRET, index.num_passages)
    assert set(found) <= set(index.ids.tolist())
    assert library.segments(list(found))
    add(library, tokenizer, [text_source("bad", f"{paragraphs(20)}\n\n{SECRET}")])
    assert (library.index().counts > 0).all()
    assert not library.damaged


def test_what_an_unfinished_creation_left_is_no_part_of_a_new_library(tmp_path: Path) -> None:
    """As a full disk or `kill -9` leaves it; the name could never be used again."""
    (tmp_path / "a").mkdir()
    for end in ("-wal", "-shm", ".new"):
        (tmp_path / "a" / f"{DATABASE}{end}").write_bytes(b"half of it")
    (tmp_path / "a" / "keys.3").write_bytes(b"keys")
    library = Library.create(tmp_path / "a", IDENTITY)
    assert library.totals() == (0, 0, 0)
    assert not (tmp_path / "a" / "keys.3").exists()
    with pytest.raises(LibraryError, match="exists already"):
        Library.create(tmp_path / "a", IDENTITY)


def test_a_removed_library_is_gone_at_once_and_its_rest_with_the_next_one(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", SECRET)])
    with monkeypatch.context() as patch:  # killed before it has removed any file
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_library(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert not library.is_there
    again = open_library(tmp_path / "a")
    assert again.files() == []
    again.close()
    remove_library(tmp_path / "a")
    library.close()
    assert list(tmp_path.iterdir()) == []


def test_erasing_goes_on_where_it_was_cut_short(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(30)), text_source("y", paragraphs(9))])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(KeysFile, "erase", fail)
        with library.writing(), pytest.raises(LibraryError, match="the disk fails"):
            library.remove_files(["x"])
    assert [file.path for file in library.files()] == ["y"]
    with library.writing():
        library.clean()
    records = np.fromfile(tmp_path / "a" / "keys.0", library.index().records.dtype)
    kept = np.zeros(len(records), np.bool_)
    for start, count in zip(library.index().starts, library.index().counts, strict=True):
        kept[start : start + count] = True
    assert not records["keys"][~kept].any()
    assert records["keys"][kept].any()


def test_damaged_keys_are_named_and_read_again(tmp_path: Path, tokenizer: Any) -> None:
    """What a disk has changed must not decide which segments are read."""
    sources = [text_source(name, paragraphs(40, name)) for name in ("good", "bad")]
    library = open_library(tmp_path / "a")
    add(library, tokenizer, sources)
    index = library.index()
    bad = int(index.starts[index.ids == index.ids.max()][0])
    library.close()
    with open(tmp_path / "a" / "keys.0", "r+b") as file:
        file.seek(bad * index.records.dtype.itemsize + 5)
        file.write(b"\x55\x55")
    library = open_library(tmp_path / "a")
    assert (library.index().counts == 0).sum() == 1
    assert library.damaged == ("bad",)
    reader = FakeReader()
    done = add(library, tokenizer, sources, reader)
    assert done.unchanged == 1
    assert 0 < reader.num_tokens <= IDENTITY.window
    assert (library.index().counts > 0).all()
    assert not library.damaged


def test_an_upload_checks_the_keys_of_its_own_file_alone(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read the whole library. What is damaged of its own file is still read again."""
    checked: list[int] = []

    def count(records: Any) -> int:
        checked.append(len(records))
        return checksum(records)

    monkeypatch.setattr("gemserve_library.library.checksum", count)
    requests = FakeRequests(planner=None, identity=IDENTITY)  # type: ignore[arg-type]

    def upload(name: str) -> int:
        """The tokens that were read."""
        library, reader = open_library(tmp_path / "a"), FakeReader()
        source = text_source(name, paragraphs(20, name))
        list(add_files(library, requests, tokenizer, reader, [source], checks_all=False))
        library.close()
        return reader.num_tokens

    sizes = []
    for number in range(20):
        checked.clear()
        assert upload(f"f{number:02}")
        sizes.append(sum(checked))
    assert sizes[19] < 1.1 * sizes[1]
    assert not upload("f07")
    library = open_library(tmp_path / "a")
    index = library.index()
    start = index.starts[index.files == index.files[index.ids == index.ids.min()]][0]
    with open(tmp_path / "a" / "keys.0", "r+b") as file:
        file.seek(int(start) * index.records.dtype.itemsize + 5)
        file.write(b"\x55\x55")
    assert not upload("f07")
    assert 0 < upload("f00") <= IDENTITY.window
    assert not open_library(tmp_path / "a").damaged


def test_what_two_files_share_is_read_again_for_the_second_one(
    tmp_path: Path, tokenizer: Any
) -> None:
    """The first one's upload dropped the keys, and the second one was never read again."""
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(60)), text_source("y", paragraphs(60))])
    library.close()
    os.truncate(tmp_path / "a" / "keys.0", 0)
    library, reader = open_library(tmp_path / "a"), FakeReader()
    requests = FakeRequests(planner=None, identity=IDENTITY)  # type: ignore[arg-type]
    for name, text in (("x", "Another text."), ("y", paragraphs(60))):
        sources = [text_source(name, text)]
        list(add_files(library, requests, tokenizer, reader, sources, checks_all=False))
    assert (library.index().counts > 0).all()
    assert not library.damaged


def test_keys_that_were_cut_off_are_named(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(60))])
    library.close()
    size = (tmp_path / "a" / "keys.0").stat().st_size
    os.truncate(tmp_path / "a" / "keys.0", size // 2)
    library = open_library(tmp_path / "a")
    assert (library.index().counts == 0).any()
    assert (library.index().counts > 0).any()
    assert library.damaged == ("x",)


def test_a_full_disk_loses_nothing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("first", paragraphs(60))])
    before = library.index().ids.tolist()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(LibraryError, match="library a: No space left on device"):
            add(library, tokenizer, [text_source("second", paragraphs(60, "lake"))])
    assert library.index().ids.tolist() == before
    assert not library.damaged
    add(library, tokenizer, [text_source("second", paragraphs(60, "lake"))])
    assert [file.path for file in library.files()] == ["first", "second"]


def test_two_processes_do_not_write_at_once(tmp_path: Path, tokenizer: Any) -> None:
    """Whoever reads meanwhile is not disturbed."""
    library, other = open_library(tmp_path / "a"), open_library(tmp_path / "a")
    with library.writing():
        with pytest.raises(LibraryBusy, match="another process"), other.writing():
            pass
        assert other.files() == []
    add(library, tokenizer, [text_source("x", paragraphs(10))])
    assert [file.path for file in other.files()] == ["x"]
    assert len(other.index().ids)


def test_a_library_that_was_made_anew_is_not_written_by_the_old_one(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Its keys were written over those of the new one."""
    old = open_library(tmp_path / "a")
    add(old, tokenizer, [text_source("x", paragraphs(10))])
    remove_library(tmp_path / "a")
    with pytest.raises(LibraryError), old.writing():
        pass
    new = open_library(tmp_path / "a")
    add(new, tokenizer, [text_source("y", paragraphs(60, "lake"))])
    with pytest.raises(LibraryError, match="library a: was removed or made anew meanwhile"):
        add(old, tokenizer, [text_source("z", paragraphs(60, "sea"))])
    new.close()
    again = open_library(tmp_path / "a")
    assert (again.index().counts > 0).all()
    assert [file.path for file in again.files()] == ["y"]


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_a_library_that_is_removed_while_it_is_opened_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    """It was an error of the server, or passed for the one that was made in its place."""
    for name in ("a", "b"):
        open_library(tmp_path / name).close()
    check = Library._check

    def check_slowly(library: Library, identity: Any) -> Any:
        found = check(library, identity)
        (tmp_path / "a").rename(tmp_path / "removed")
        if is_made_anew:
            (tmp_path / "b").rename(tmp_path / "a")
        return found

    monkeypatch.setattr(Library, "_check", check_slowly)
    with closing(open_library(tmp_path / "a")) as library:
        assert not library.is_there


def test_what_is_removed_is_gone_from_the_folder(tmp_path: Path, tokenizer: Any) -> None:
    """From tables, words, their log and the keys: a folder may be handed on."""
    text = f"{paragraphs(40)}\n\nThe {SECRET} is seven.\n\n{paragraphs(10, 'lake')}"
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("kept", paragraphs(40, "sea")), text_source("x", text)])
    used = library.index()
    ids = {
        number
        for number, (file, _) in library.segments(used.ids.tolist()).items()
        if file.path == "x"
    }
    places = [
        (int(s), int(c))
        for i, s, c in zip(used.ids, used.starts, used.counts, strict=True)
        if int(i) in ids
    ]
    assert library.by_words(SECRET, 100)
    with library.writing():
        library.remove_files(["x"])
    assert not library.by_words(SECRET, 100)
    assert [file.path for file in library.files()] == ["kept"]
    for path in (tmp_path / "a").iterdir():
        assert SECRET.encode() not in path.read_bytes(), path.name
    size = used.records.dtype.itemsize
    content = (tmp_path / "a" / "keys.0").read_bytes()
    for start, count in places:
        assert not any(content[start * size : (start + count) * size])
    assert (library.index().counts > 0).all()


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_what_is_replaced_is_gone_from_the_folder(
    tmp_path: Path, tokenizer: Any, is_cut_short: bool
) -> None:
    """The log of writes and the index of words kept it, as long as another one had it open."""
    library, other = open_library(tmp_path / "a"), open_library(tmp_path / "a")
    text = f"{paragraphs(40)}\n\nThe {SECRET} is seven."
    add(library, tokenizer, [text_source("x", text)])
    assert other.by_words(SECRET, 100)
    sources = [text_source("x", paragraphs(40)), text_source("y", paragraphs(300, "lake"))]
    if is_cut_short:
        with pytest.raises(LibraryError, match="the power failed"):
            add(library, tokenizer, sources, FakeReader(fails_after=1))
        assert [file.path for file in library.files()] == ["x"]
        sources = []
    add(library, tokenizer, sources)
    assert not other.by_words(SECRET, 100)
    for path in (tmp_path / "a").iterdir():
        assert SECRET.encode() not in path.read_bytes(), path.name
    other.close()


def test_gaps_are_closed_when_they_are_large(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemserve_library.library._WASTE", 100)
    library = open_library(tmp_path / "a")
    sources = [text_source(str(i), paragraphs(30, f"w{i}")) for i in range(4)]
    add(library, tokenizer, sources)
    reader = open_library(tmp_path / "a")
    before = reader.index()
    with library.writing():
        library.remove_files(["0", "1", "2"])
    assert not (tmp_path / "a" / "keys.0").exists()
    after = library.index()
    assert len(after.records) == after.counts.sum()
    old = {
        int(i): before.records[s : s + c]
        for i, s, c in zip(before.ids, before.starts, before.counts, strict=True)
    }
    for number, start, count in zip(after.ids, after.starts, after.counts, strict=True):
        assert (after.records[start : start + count] == old[int(number)]).all()
    assert reader.index().ids.tolist() == after.ids.tolist()
    assert not reader.damaged


def test_the_disk_is_waited_for_once_for_all_that_is_erased_or_moved(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was for each window: thousands of times for a long file, with the library locked."""
    library = open_library(tmp_path / "a")
    sources = [text_source(word, paragraphs(60, word)) for word in ("lake", "sea")]
    add(library, tokenizer, sources)
    assert min(file.num_windows for file in library.files()) > 3
    waited, fsync = [0], os.fsync

    def counted(descriptor: int) -> None:
        waited[0] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    with library.writing():
        library.remove_files(["lake"])
        assert waited == [1]
        library.clean(is_full=True)
    assert waited == [2]
    assert len(library.index().records) == library.index().counts.sum()
    assert not library.damaged


def test_a_search_while_keys_are_moved_together_finds_them(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file was gone when it was opened, and all segments were taken for damaged."""
    writer = open_library(tmp_path / "a")
    add(writer, tokenizer, [text_source(name, paragraphs(30, name)) for name in ("x", "y")])
    with writer.writing():
        writer.remove_files(["x"])
    reader, read = open_library(tmp_path / "a"), KeysFile.read

    def moved_before(self: KeysFile, count: int) -> Any:
        monkeypatch.setattr(KeysFile, "read", read)
        with writer.writing():
            writer.clean(is_full=True)
        return read(self, count)

    monkeypatch.setattr(KeysFile, "read", moved_before)
    assert (reader.index().counts > 0).all()
    assert len(reader.index().ids)
    assert not reader.damaged
    assert (tmp_path / "a" / "keys.1").exists()


def test_a_segment_in_two_files_stays_until_both_are_gone(tmp_path: Path, tokenizer: Any) -> None:
    library, text = open_library(tmp_path / "a"), paragraphs(30)
    reader = FakeReader()
    add(library, tokenizer, [text_source("x", text), text_source("y", text)], reader)
    assert reader.num_tokens < 1.1 * library.find_file("x").num_tokens  # type: ignore[union-attr]
    with library.writing():
        library.remove_files(["x"])
    assert (library.index().counts > 0).all()
    assert not library.damaged


def test_an_error_of_the_database_is_one_of_the_library(tmp_path: Path) -> None:
    library = open_library(tmp_path / "a")
    library.close()
    with pytest.raises(LibraryError, match="library a"):
        library.files()
    assert issubclass(sqlite3.ProgrammingError, sqlite3.DatabaseError)
