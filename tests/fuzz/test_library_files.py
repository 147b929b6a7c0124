"""Whatever stands in a library's folder: it is used, or refused by its name, and can be deleted."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gemserve.errors import LibraryError
from gemserve.model.loading.checkpoint import BUILTIN_PATH
from gemserve_library.library import DATABASE, Library, remove_library
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes
from tests.library.worlds import IDENTITY, add, open_library, paragraphs, text_source

VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=20), st.binary(max_size=20)
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("library") / "notes"
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_PATH)
    with closing(open_library(folder)) as library:
        files = (("a.md", paragraphs(40)), ("b.txt", paragraphs(30, "ferry")), ("c", "A word."))
        add(library, tokenizer, [text_source(*file) for file in files])
        library._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder


def use(folder: Path) -> None:
    """All that a search reads. Raises `LibraryError` and nothing else."""
    with closing(Library(folder, IDENTITY)) as library:
        library.totals()
        library.file_ids()
        files = library.files()
        index = library.index()
        library.segments([int(number) for number in index.ids])
        library.by_words("How many houses are beside the ferry?", max(1, index.num_passages))
        for file in files:
            library.find_file(file.path)


def is_refused(folder: Path) -> bool:
    try:
        use(folder)
    except LibraryError as error:
        assert str(error).startswith(f"library {folder.name}: ")
        return True
    return False


def removed(folder: Path) -> None:
    remove_library(folder)
    assert not folder.exists()


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copied"))


def test_a_copy_is_a_library(copy: Path) -> None:
    assert not is_refused(copy)
    removed(copy)


@given(st.data())
@cases(60)
def test_a_changed_database(original: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("changed") / "copied"))
    content = (original / DATABASE).read_bytes()
    (folder / DATABASE).write_bytes(data.draw(changed_bytes(content, 4096)))
    with bounded("library database", cpu_s=5, grown_bytes=100 * MIB):
        is_refused(folder)
        removed(folder)


@given(st.data())
@cases(60)
def test_values_that_nobody_has_written(
    original: Path, tmp_path_factory: Any, data: st.DataObject
) -> None:
    """SQLite takes any value in any column."""
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("values") / "copied"))
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        table = data.draw(st.sampled_from(("settings", "files", "windows", "keys")))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column = data.draw(st.sampled_from(columns))
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}")]
        chosen, value = data.draw(st.sampled_from(rows)), data.draw(VALUES)
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, chosen))
            connection.commit()
        except sqlite3.Error:
            return  # not even SQLite takes it
    with bounded("library values", cpu_s=5, grown_bytes=100 * MIB):
        is_refused(folder)
        removed(folder)


def test_keys_that_begin_beyond_what_numpy_can_count(copy: Path) -> None:
    """Found by the test above: their bytes were more than 64 bits can say."""
    with closing(sqlite3.connect(copy / DATABASE)) as connection:
        connection.execute("UPDATE keys SET start = 768614336404564507 WHERE start > 0")
        connection.commit()
    assert not is_refused(copy)  # it is found by its words
    removed(copy)


@pytest.mark.parametrize("table", ["settings", "files", "windows", "keys"])
def test_a_table_is_missing(copy: Path, table: str) -> None:
    with closing(sqlite3.connect(copy / DATABASE)) as connection:
        connection.execute(f"DROP TABLE {table}")
    assert is_refused(copy)
    removed(copy)


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 5000])
def test_something_else_in_its_place(copy: Path, content: bytes) -> None:
    (copy / DATABASE).write_bytes(content)
    assert is_refused(copy)
    removed(copy)


def test_another_programs_database(copy: Path) -> None:
    (copy / DATABASE).unlink()
    with closing(sqlite3.connect(copy / DATABASE)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    assert is_refused(copy)
    removed(copy)
