"""`gemserve library` and `gemserve ask --library`: two commands to an answer with its sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemserve.cli.main import main
from gemserve.library.store import DATABASE
from tests.library.worlds import IDENTITY, open_library, paragraphs
from tests.pdfs import pdf_of

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
    run(capsys, "library", "remove", "boats", str(notes), *place)
    listed, _ = run(capsys, "library", "list", *place)
    assert listed.startswith("boats: 0 files, ")
    run(capsys, "library", "remove", "boats", *place)
    assert not (tmp_path / "libraries" / "boats").exists()


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
