"""`gemserve library` and `gemserve ask --library`: two commands to an answer with its sources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve_library.library import DATABASE, Library
from gemserve_library.reading_time import duration
from tests.library.worlds import IDENTITY, open_library, paragraphs
from tests.pdfs import pdf_of
from tests.unit.test_options import settings

__all__ = ["settings"]
QUESTION = "When does the ferry to Malmo leave?"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert main(arguments) == status, capsys.readouterr()
    said = capsys.readouterr()
    return said.out, said.err


def test_two_commands_answer_with_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, place = tmp_path / "notes", ("--library-dir", str(tmp_path / "libraries"))
    (notes / "sub").mkdir(parents=True)
    ferry = f"# Ferries\n\nThe ferry to Malmo leaves at nine.\n\n{paragraphs(120)}"
    (notes / "ferry.md").write_text(ferry)
    (notes / "sub" / "sea.txt").write_text(paragraphs(60, "sea"))
    (notes / "picture").write_bytes(bytes(range(256)))
    added, said = run(capsys, "library", "add", "boats", str(notes), *place)
    assert added.startswith("2 files added or changed, 0 unchanged, 0 gone, 1 left out;")
    assert "picture: is no text" in said
    assert "tokens to read in 2 texts" in said or "tokens to read in 3 texts" in said
    answer, said = run(
        capsys,
        "ask",
        "--library",
        "boats",
        "--candidates",
        "2",
        "--max-tokens",
        "4",
        QUESTION,
        *place,
    )
    assert answer.strip()
    assert "sources, the best first:" in said
    assert f"{notes}/ferry.md:" in said
    (notes / "sub" / "sea.txt").unlink()
    added, _ = run(capsys, "library", "add", "boats", str(notes), *place)
    assert added.startswith("0 files added or changed, 1 unchanged, 1 gone, 1 left out; 0 tokens")
    listed, _ = run(capsys, "library", "list", *place)
    assert listed.startswith("boats: 1 files, ")
    listed, _ = run(capsys, "library", "list", "boats", *place)
    assert listed.strip().endswith(f"{notes}/ferry.md")
    other_path = str(notes / "sub" / ".." / ".." / "notes")
    run(capsys, "library", "remove", "boats", other_path, *place)
    listed, _ = run(capsys, "library", "list", *place)
    assert listed.startswith("boats: 0 files, ")
    run(capsys, "library", "remove", "boats", *place)
    assert not (tmp_path / "libraries" / "boats").exists()


def test_what_is_left_out_and_the_time_are_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log of 30 MB took 13 minutes, which nothing had said; a secret was stored."""
    notes, place = tmp_path / "notes", ("--library-dir", str(tmp_path / "libraries"))
    notes.mkdir()
    (notes / "sea.txt").write_text(paragraphs(300))
    (notes / "secrets.json").write_text("{}")
    (notes / "a.csv").write_text("a,b\n1,2\n")
    _, said = run(capsys, "library", "add", "boats", str(notes), *place)
    first, second = [line for line in said.splitlines() if line.startswith(("left", "about"))]
    assert first == f"left out: 1 files that may hold secrets: {notes}/secrets.json"
    assert re.fullmatch(
        r"about \d+,\d{3} tokens to read in 1 texts, and 1 packed files or files of other formats",
        second,
    )
    expected = int(second.split()[1].replace(",", ""))
    library = Library(tmp_path / "libraries" / "boats")
    assert abs(library.totals()[2] - expected) < 0.1 * expected
    assert library.speed > 0
    (notes / "more.txt").write_text(paragraphs(300, "lake"))
    _, said = run(capsys, "library", "add", "boats", str(notes), *place)
    assert re.search(r" tokens to read in 1 texts: about .+ at [\d,]+ a second\n", said)


def test_a_secret_that_was_added_before_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, place = tmp_path / "notes", ("--library-dir", str(tmp_path / "libraries"))
    notes.mkdir()
    for name in ("sea.txt", "id_rsa"):
        (notes / name).write_text("The ferry leaves at nine.")
    run(capsys, "library", "add", "boats", str(notes / "id_rsa"), *place)
    added, _ = run(capsys, "library", "add", "boats", str(notes), *place)
    assert added.startswith("1 files added or changed, 0 unchanged, 1 gone")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.1, "1 s"), (90, "90 s"), (780, "13 min"), (9000, "2.5 h")]
)
def test_durations_are_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert duration(seconds) == f"about {said}"


def test_what_is_no_library_is_named_and_made_anew_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, place = tmp_path / "notes", ("--library-dir", str(tmp_path / "libraries"))
    notes.mkdir()
    (notes / "ferry.md").write_text("The ferry to Malmo leaves at nine.")
    (tmp_path / "libraries" / "boats" / DATABASE).mkdir(parents=True)
    _, said = run(capsys, "library", "add", "boats", str(notes), *place, status=2)
    assert f"library boats: {DATABASE} is not a file" in said
    added, _ = run(capsys, "library", "add", "boats", str(notes), "--anew", *place)
    assert added.startswith("1 files added or changed")


def test_a_pdf_is_asked_without_a_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ferry.pdf").write_bytes(pdf_of(["The ferry to Malmo leaves at nine."]))
    (tmp_path / "picture").write_bytes(bytes(range(256)))
    words = ("--max-tokens", "4", "--show-kept")
    answer, said = run(capsys, "ask", str(tmp_path / "ferry.pdf"), QUESTION, *words)
    assert answer.strip()
    assert "read all" in said
    _, said = run(capsys, "ask", str(tmp_path / "picture"), QUESTION, status=2)
    assert f"{tmp_path}/picture: is no text" in said


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--library-dir", str(tmp_path))
    open_library(tmp_path / "other").close()
    for arguments, message in (
        (("library", "add", "../x", str(tmp_path)), "library '../x': a name has"),
        (("library", "add", "x", str(tmp_path / "none")), "there is no such file or folder"),
        (
            ("library", "add", "x", str(tmp_path / "other"), str(tmp_path / "none")),
            "there is no such file or folder",
        ),
        (("library", "list", "none"), f"library none: {tmp_path} has none of this name; it has: "),
        (("ask", "--library", "none", "Why?"), "it has: other"),
        (
            ("library", "list", "none", "--library-dir", str(tmp_path / "nowhere")),
            "gemserve library add none PATH… makes one",
        ),
        (("library", "remove", "other", "none"), "the library other has no such file"),
        (
            ("ask", "--library", "other", "Why?"),
            f"was read by {IDENTITY.shown}, and this is builtin",
        ),
        (("ask",), "there is no QUESTION: gemserve ask FILE…"),
        (("ask", "Why?"), "there is no FILE to ask 'Why?' about: gemserve ask FILE…"),
        (("ask", __file__), f"there is no QUESTION about the file {__file__}"),
    ):
        where = () if "--library-dir" in arguments else place
        _, said = run(capsys, *arguments, *where, status=2)
        assert message in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("library", "add", "x", __file__, "/no/such/file"),
        ("ask", "/no/such/file", "Why?"),
        ("ask", "--library", "nosuch", "Why?"),
    ],
)
def test_a_mistyped_name_is_told_before_a_model_is_loaded(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Bug: torch was imported and the model loaded first, which took 3.6 s and more."""
    code = (
        "import sys; from gemserve.cli.main import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *arguments, "--library-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("stands_there", ["zeros", "a folder"])
def test_a_damaged_library_can_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stands_there: str
) -> None:
    place = ("--library-dir", str(tmp_path))
    for name in ("damaged", "whole"):
        open_library(tmp_path / name).close()
    database = tmp_path / "damaged" / DATABASE
    database.unlink()
    if stands_there == "zeros":
        database.write_bytes(b"\0" * 8192)
    else:
        database.mkdir()
    listed, said = run(capsys, "library", "list", *place)
    assert listed.startswith("whole: 0 files, ")
    assert "library damaged: " in said
    run(capsys, "library", "remove", "damaged", *place)
    assert not (tmp_path / "damaged").exists()
    listed, said = run(capsys, "library", "list", *place)
    assert (listed.startswith("whole: "), said) == (True, "")


def test_the_variable_of_libraries_names_all_of_them(settings: Any) -> None:
    words = ["ask", "notes.txt", "Who?"]
    found = settings(words, GEMSERVE_LIBRARY="boats, cars")
    assert found["libraries"] == ["boats", "cars"]
    assert settings([*words, "--library", "b"], GEMSERVE_LIBRARY="a")["libraries"] == ["b"]
