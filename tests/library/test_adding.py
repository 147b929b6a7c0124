"""What is added is read once, whatever ends the work in between."""

from __future__ import annotations

import gzip
import itertools
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gemserve.errors import LibraryError, PdfsBusy, RequestError
from gemserve.files import file_text
from gemserve.files.converting import PackageMissing
from gemserve.files.file_text import FileText
from gemserve_library.adding import FileSource, add_files
from gemserve_library.command import gone_files
from gemserve_library.cutting import cut_file, sections
from gemserve_library.finding import LeftOut, absolute_path, find_files
from gemserve_library.ignore_rules import IgnoreRules
from gemserve_library.library import Library
from tests.library.worlds import (
    IDENTITY,
    FakeReader,
    FakeRequests,
    add,
    open_library,
    paragraphs,
    text_source,
)

KILLED = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from gemserve.model.loading.loader import BUILTIN_PATH
from tests.library.worlds import FakeReader, add, open_library, paragraphs, text_source

class Slow(FakeReader):
    def __call__(self, request):
        print("reads", flush=True)
        time.sleep(0.05)
        return super().__call__(request)

sources = [text_source(f"{i:03}", paragraphs(60, f"w{i}")) for i in range(60)]
add(open_library(Path(sys.argv[1])), AutoTokenizer.from_pretrained(BUILTIN_PATH), sources, Slow())
"""


def text_of(library: Library, path: str) -> str:
    segments = library.segments(library.index().ids.tolist()).values()
    parts = sorted((w.start, w.text) for file, w in segments if file.path == path)
    return "".join(text for _, text in parts)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.txt"
    path.write_text(paragraphs(40))
    library = open_library(tmp_path / "a")
    assert add(library, tokenizer, [FileSource.of_file(path)]).files == 1
    os.utime(path)  # another time, the same content
    for _ in range(2):
        reader = FakeReader()
        done = add(library, tokenizer, [FileSource.of_file(path)], reader)
        assert (done.files, done.unchanged, reader.num_tokens) == (0, 1, 0)


def test_of_a_changed_file_only_changed_segments_are_read(tmp_path: Path, tokenizer: Any) -> None:
    library, text = open_library(tmp_path / "a"), paragraphs(300)
    add(library, tokenizer, [text_source("x", text)])
    changed = text.replace("Paragraph 150 tells", "Nobody knows why paragraph 150 tells")
    reader = FakeReader()
    done = add(library, tokenizer, [text_source("x", changed)], reader)
    assert done.files == 1
    assert 0 < reader.num_tokens <= 3 * IDENTITY.window
    assert text_of(library, "x") == changed
    assert not library.by_words("nobodyhere", 1000)
    # what is no longer needed is gone
    used = sum(file.num_tokens for file in library.files())
    assert library.index().counts.sum() == used


def test_a_failed_add_goes_on_where_it_ended(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    sources = [text_source(f"{i:02}", paragraphs(200, f"w{i}")) for i in range(10)]
    first = FakeReader(fails_after=3)
    with pytest.raises(LibraryError, match="the power failed"):
        add(library, tokenizer, sources, first)
    second = FakeReader()
    add(library, tokenizer, sources, second)
    assert len(library.files()) == 10
    total = sum(file.num_tokens for file in library.files())
    assert first.num_tokens + second.num_tokens == total


def test_a_killed_process_leaves_a_whole_library(tmp_path: Path, tokenizer: Any) -> None:
    sources = [text_source(f"{i:03}", paragraphs(60, f"w{i}")) for i in range(60)]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a")]
    read_before = 0
    for wait in (1, 4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(wait):
            assert process.stdout.readline() == "reads\n"
        time.sleep(0.05 * Random(wait).random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        library = open_library(tmp_path / "a")
        for file in library.files():
            assert text_of(library, file.path) == paragraphs(60, f"w{int(file.path)}")
        assert (library.index().counts > 0).all()
        assert not library.damaged
        read_before = len(library.files())
        library.close()
    assert read_before
    library, reader = open_library(tmp_path / "a"), FakeReader()
    add(library, tokenizer, sources, reader)
    total = sum(file.num_tokens for file in library.files())
    assert len(library.files()) == 60
    assert reader.num_tokens < total


@pytest.mark.slow
def test_tiny_files_are_read_together(tmp_path: Path, tokenizer: Any) -> None:
    """10,000 files of a line each must not take 10,000 passes and transactions, or much disk."""
    folder, library, reader = tmp_path / "f", open_library(tmp_path / "a"), FakeReader()
    folder.mkdir()
    for i in range(2000):
        (folder / f"{i:05}").write_text(f"The code of locker {i} is {i * 7919}.")
    writes: list[str] = []
    library._connection.set_trace_callback(writes.append)
    done = add(library, tokenizer, map(FileSource.of_file, find_files([str(folder)])), reader)
    library._connection.set_trace_callback(None)
    assert done.files == 2000
    assert reader.num_requests < 20
    assert sum(each.startswith("COMMIT") for each in writes) < 60
    assert len(library.index().ids) == 2000
    assert library.num_bytes < 2000 * 4096
    again = add(library, tokenizer, map(FileSource.of_file, find_files([str(folder)])), reader)
    assert (again.files, again.unchanged) == (0, 2000)


@pytest.mark.slow
def test_a_long_file_takes_memory_in_proportion(tmp_path: Path, tokenizer: Any) -> None:
    """Bug: a file's tokens were all held at once; one of 100 MB needs 6 bytes for each of its."""
    path, library = tmp_path / "long.txt", open_library(tmp_path / "a")
    size = path.write_text(paragraphs(10_000))
    tracemalloc.start()
    try:
        done = add(library, tokenizer, [FileSource.of_file(path)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done.files == 1
    assert peak < 12 * size + (24 << 20)  # 24 MiB: of a group of segments and of a section


def test_a_file_above_the_limit_is_left_out_unopened(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_text, "MOST_BYTES", 1000)
    (tmp_path / "long.txt").write_text(paragraphs(20))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(paragraphs(20).encode()))
    sources = [FileSource.of_file(tmp_path / name) for name in ("long.txt", "packed.gz")]
    done = add(open_library(tmp_path / "a"), tokenizer, [*sources, text_source("x", "A ferry.")])
    reasons = [reason for _, reason in done.skipped]
    assert reasons[0].endswith("bytes, the limit is 1,000; split it")
    assert reasons[1] == "unpacks to more than 1,000 bytes, the limit"
    assert done.files == 1


def test_what_is_no_text_is_left_out_and_said(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "f").mkdir()
    contents = {
        "binary": bytes(range(256)) * 9,
        "empty": b"",
        "blank.txt": b" \n\n ",
        "packed.gz": b"\x1f\x8bno gzip",
        "fake.pdf": b"%PDF-1.4 nothing",
        "good.txt.gz": gzip.compress(b"The lantern is green."),
        "latin.txt": "Das Café öffnet um acht.".encode("latin-1"),
        "utf16.txt": "The ferry leaves at nine.".encode("utf-16"),
    }
    for name, content in contents.items():
        (tmp_path / "f" / name).write_bytes(content)
    library = open_library(tmp_path / "a")
    done = add(library, tokenizer, map(FileSource.of_file, find_files([str(tmp_path / "f")])))
    left_out = {Path(path).name: reason for path, reason in done.skipped}
    assert left_out.keys() == {"binary", "empty", "blank.txt", "packed.gz", "fake.pdf"}
    assert left_out["binary"].startswith("is no text (10.")
    assert left_out["empty"] == "is empty"
    assert "cannot be unpacked" in left_out["packed.gz"]
    assert "fake.pdf" in left_out["fake.pdf"] or "PDF" in left_out["fake.pdf"]
    assert text_of(library, str(tmp_path / "f" / "latin.txt")) == "Das Café öffnet um acht."
    assert "ferry" in text_of(library, str(tmp_path / "f" / "utf16.txt"))
    assert "lantern" in text_of(library, str(tmp_path / "f" / "good.txt.gz"))


def test_a_file_with_an_odd_name_or_no_content_leaves_out_itself_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    """A name that is not UTF-8 ended the whole add, with words about a damaged database."""
    folder = tmp_path / "notes"
    folder.mkdir()
    Path(os.fsdecode(bytes(folder) + b"/caf\xe9.txt")).write_text("A word.")
    (folder / "good.txt").write_text("A word.")
    os.mkfifo(folder / "pipe")
    library = open_library(tmp_path / "library")
    named = [*find_files([str(folder)]), folder / "pipe"]
    done = add(library, tokenizer, [FileSource.of_file(path) for path in named])
    assert [Path(file.path).name for file in library.files()] == ["good.txt"]
    assert [reason for _, reason in done.skipped] == ["has a name that is not UTF-8", "is no file"]


@pytest.mark.parametrize("content", [b"", bytes(range(256))])
def test_a_file_that_changed_into_no_text_loses_what_was_stored(
    tmp_path: Path, tokenizer: Any, content: bytes
) -> None:
    """Its old text was cited, with lines that were no more."""
    library = open_library(tmp_path / "library")
    path = tmp_path / "notes.txt"
    path.write_text("The ferry leaves at nine.")
    add(library, tokenizer, [FileSource.of_file(path)])
    assert len(library.files()) == 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    done = add(library, tokenizer, [text_source("other", paragraphs(5)), FileSource.of_file(path)])
    assert [file.path for file in library.files()] == ["other"]
    assert done.skipped[0][1].endswith("; what it had before is removed")
    assert not library.damaged
    path.unlink()  # now nobody knows what it has
    add(library, tokenizer, [FileSource.of_file(path)])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a.pdf", PdfsBusy("5 are being read")),
        ("a.epub", PackageMissing("is EPUB, which is not read here")),
        ("a.pdf", RequestError("is a PDF", param="file", code="pdf_not_supported")),
    ],
)
def test_a_file_that_cannot_be_read_now_keeps_what_was_stored(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    """A busy machine removed files from libraries, and so did one that lacked a package."""

    def refuse(*_: object) -> None:
        raise error

    library, path = open_library(tmp_path / "library"), tmp_path / name
    monkeypatch.setattr(file_text, "kind_of", lambda *_: "text")
    path.write_text("The ferry leaves at nine.")
    add(library, tokenizer, [FileSource.of_file(path)])
    kept = library.files()
    path.write_text("%PDF- at ten")
    monkeypatch.setattr(file_text, "kind_of", lambda *_: path.suffix[1:])
    monkeypatch.setattr(file_text, "convert", refuse)
    done = add(library, tokenizer, [FileSource.of_file(path)])
    assert done.skipped == [(str(path), str(error))]
    assert library.files() == kept != []


@pytest.mark.slow
def test_a_word_that_cannot_be_divided_leaves_out_its_file_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    library = open_library(tmp_path / "a")
    sources = [text_source("long", "x" * 3_000_000), text_source("good", paragraphs(5))]
    done = add(library, tokenizer, sources)
    assert next(file.path for file in library.files()) == "good"
    assert len(done.skipped) + len(library.files()) == 2


def test_segments_know_their_lines_and_headings(tokenizer: Any) -> None:
    text = f"# Boats\n\n{paragraphs(20)}\n\n## Ferries\n\n{paragraphs(40, 'ferry')}\n"
    cuts = list(cut_file(tokenizer, FileText(text=text, kind="text"), (1,), 256))
    assert "".join(cut.segment.text for cut in cuts) == text
    for cut in cuts:
        at = cut.segment.start
        assert text[at:].startswith(cut.segment.text)
        assert cut.segment.line == 1 + text.count("\n", 0, at)
        assert len(cut.tokens) == cut.segment.num_tokens
    assert cuts[-1].segment.heading == "# Boats › ## Ferries"
    assert cuts[0].segment.heading == ""


def test_a_long_text_is_cut_in_sections_that_are_found_again() -> None:
    """The memory for a file of 100 MB must be that of a section."""
    text = paragraphs(30_000)
    ranges = list(sections(text))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(text)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert max(stop - start for start, stop in ranges) <= 1 << 19
    inserted = "A new paragraph.\n\n" + text
    old = {text[start:stop] for start, stop in ranges}
    new = [inserted[start:stop] for start, stop in sections(inserted)]
    assert sum(part not in old for part in new) <= 2
    blob = "x" * (1 << 21)
    assert all(stop - start <= 1 << 19 for start, stop in sections(blob))


def test_files_are_found_by_folder_pattern_and_repository(tmp_path: Path) -> None:
    for name in ("a.md", "sub/b.txt", ".hidden", "node_modules/c.js", "built.o"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")

    def names(*given: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in find_files(given)]

    folder = str(tmp_path)
    assert names(folder) == ["a.md", "built.o", "sub/b.txt"]
    assert names(f"{folder}/*.md", f"{folder}/a.md") == ["a.md"]
    assert names(f"{folder}/**/*.txt") == ["sub/b.txt"]
    with pytest.raises(LibraryError, match="no such file"):
        names(f"{folder}/nothing")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "a.md", ".hidden"], check=True)
    assert names(folder) == [".hidden", "a.md"]
    assert names(f"{folder}/sub") == ["sub/b.txt"]


TREE = (
    *("a.md", "keep.log", "x.log", "sub/deep/x.log", "sub/own.txt", "docs/tmp/a.txt", "tmp/a.txt"),
    *("venv/lib.py", "mine/pyvenv.cfg", "mine/lib.py", "build/a.js", "sub/dist/b.js", "target/c"),
    *(".venv/x.py", ".env", "sub/server.pem", "id_rsa", "sub/credentials", ".env.example", "k.txt"),
)


def test_a_file_has_one_path_however_it_is_written(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way of writing it was a file of its own, and what was gone of the others stayed."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "desk").mkdir()
    file = tmp_path / "docs" / "a.txt"
    file.write_text("A word.")
    monkeypatch.chdir(tmp_path / "desk")
    library = open_library(tmp_path / "library")
    for given in ("../docs", str(tmp_path / "docs"), "../docs/*", "../desk/../docs/a.txt"):
        add(library, tokenizer, map(FileSource.of_file, find_files([given])))
        assert [each.path for each in library.files()] == [str(file)]
    # `..` of a linked folder is where the folder is
    (other := tmp_path / "desk" / "out").symlink_to(tmp_path / "docs")
    assert absolute_path(other / ".." / "docs") == other / ".." / "docs"
    file.unlink()
    assert gone_files(library, ["../docs"], LeftOut(), []) == [str(file)]


def test_what_is_ignored_made_or_secret_is_left_out_and_counted(tmp_path: Path) -> None:
    """Keys and whole environments went into libraries of folders without git."""
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "k.txt").write_text("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n")
    (tmp_path / ".gitignore").write_text("# logs\n*.log\n!keep.log\n/tmp/\ndocs/**/\\a.txt\n")
    (tmp_path / "sub" / ".gitignore").write_text("own.txt\n!x.log\n")
    left_out = LeftOut()
    found = find_files([str(tmp_path)], left_out)
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a.md",
        "keep.log",
        "sub/deep/x.log",
    ]
    assert {path.name for path in left_out.secrets} == {
        *(".env", "server.pem", "id_rsa", "credentials", "k.txt")
    }
    assert {path.name for path in left_out.folders} == {
        *("venv", "mine", "build", "dist", "target", ".venv")
    }
    assert left_out.ignored == 4
    assert left_out.lines(2)[0].startswith("5 files that may hold secrets: ")
    assert left_out.lines(2)[0].endswith(" and 3 more")
    named = [str(tmp_path / "id_rsa"), str(tmp_path / "build")]  # whoever names it means it
    assert [path.name for path in find_files(named)] == ["id_rsa", "a.js"]
    by_pattern = LeftOut()
    assert [path.name for path in find_files([f"{tmp_path}/**/*.js"], by_pattern)] == []
    assert {path.name for path in by_pattern.folders} == {"build", "dist"}


@pytest.mark.parametrize(
    ("rule", "ignored", "kept"),
    [
        ("a", "x/a", "ab"),
        ("/a", "a", "x/a"),
        ("x/a", "x/a", "y/x/a"),
        ("a?[bc]", "a1b", "a1d"),
        ("**/x/*.c", "p/q/x/a.c", "x/y/a.c"),
        ("x/**", "x/y/a", "y"),
        ("\\#a", "#a", "a"),
        ("a ", "a", "a "),
    ],
)
def test_rules_of_gitignore(tmp_path: Path, rule: str, ignored: str, kept: str) -> None:
    (tmp_path / ".gitignore").write_text(f"{rule}\n")
    rules = IgnoreRules.of_folder(tmp_path)
    assert rules is not None
    assert rules.decide(tmp_path / ignored, is_folder=False) is True
    assert rules.decide(tmp_path / kept, is_folder=False) is None


def test_hostile_rules_of_gitignore_end_soon(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*a" * 100 + "b\n" + "**/" * 100 + "x\n")
    (tmp_path / ("a" * 200)).write_text("x")
    began_s = time.process_time()
    assert len([*find_files([str(tmp_path)])]) == 1
    assert time.process_time() - began_s < 1
    (tmp_path / ".gitignore").write_text("a\n" * 10_001)
    with pytest.raises(LibraryError, match=r"gitignore: has 10,001 rules, the limit is 10,000"):
        [*find_files([str(tmp_path)])]
    (tmp_path / ".gitignore").write_text("#" * (2 << 20))
    with pytest.raises(LibraryError, match=r"has more than 1,048,576 bytes, the limit"):
        [*find_files([str(tmp_path)])]


def test_what_is_known_is_told_before_anything_is_read(tmp_path: Path, tokenizer: Any) -> None:
    """A command that went on behind a large file said nothing for minutes."""
    text = paragraphs(200)
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", text)])
    requests = FakeRequests(planner=None, identity=IDENTITY)  # type: ignore[arg-type]
    adding = add_files(library, requests, tokenizer, FakeReader(), [text_source("y", text)])
    told = [(added.known_tokens, added.read_tokens, added.files) for added in adding]
    assert told[0][0] > 0
    assert told[0][1:] == (0, 0)
    assert told[-1][0] == library.totals()[2] / 2
