"""`gemserve library` and `gemserve ask --library`: two commands to an answer with its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemserve.cli.main import main
from tests.library.worlds import IDENTITY, open_library, paragraphs

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


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--library-dir", str(tmp_path))
    open_library(tmp_path / "other").close()
    for arguments, message in (
        (("library", "add", "../x", str(tmp_path)), "library '../x': a name has"),
        (("library", "add", "x", str(tmp_path / "none")), "there is no such file or folder"),
        (("library", "list", "none"), "library none: there is no library"),
        (("library", "remove", "other", "none"), "the library other has no such file"),
        (
            ("ask", "--library", "other", "Why?"),
            f"was read by {IDENTITY.shown}, and this is builtin",
        ),
        (("ask", "Why?"), "give files to ask about, or --library NAME"),
    ):
        _, said = run(capsys, *arguments, *place, status=2)
        assert message in said
