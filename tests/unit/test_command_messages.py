"""What `gemserve serve` and `gemserve ask` print for people."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve.errors import ModelError
from gemserve_client.cli.main import main as client_main


def test_serve_says_what_it_loads_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: nothing was printed until the model was there, which may take minutes."""

    def fail(*_: Any) -> Any:
        raise ModelError("stop here")

    monkeypatch.setattr("signal.signal", lambda *_: None)  # serve would change it for all tests
    monkeypatch.setattr("gemserve.calibration.search.idle_calibration.build_served_core", fail)
    assert main(["serve", "--model", "builtin", "--port", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["gemserve: loading builtin …", "gemserve: stop here"]


def test_ask_does_not_print_a_document_that_was_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: `--show-kept` printed the whole document as one kept passage."""
    notes = tmp_path / "notes.txt"
    notes.write_text("The code for the lantern is 48213.")
    question = "What is the code for the lantern?"
    assert main(["ask", str(notes), question, "--show-kept", "--max-tokens", "8"]) == 0
    shown = capsys.readouterr()
    assert "the model reads the whole prompt: all of its text is kept" in shown.err
    assert "48213" not in shown.err


def test_ask_reads_any_encoding_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = io.BytesIO("The café's code is 48213.".encode("cp1252"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(notes))
    question = "What is the code?"
    assert main(["ask", "-", question, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "words",
    [
        *(["ask", "a.txt"], ["library", "add", "x"], ["library", "list"], ["library", "remove"]),
        *(["serve", "--model"], ["plan", "--model"], ["eval"], ["calibrate"], ["adapter"]),
        *(["demo", "--port"], ["ask", "--also"], []),
    ],
)
@pytest.mark.parametrize("client", [False, True])
def test_an_argument_that_is_not_utf_8_is_named(
    words: list[str], client: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a Python error, or after the model was loaded."""
    run = client_main if client else main
    assert run([*words, "caf\udce9"]) == 2
    assert f"argument {len(words) + 1}: b'caf\\xe9' is not UTF-8; rename" in capsys.readouterr().err


CODES = {"lantern": "48213", "ladder": "51907"}


@pytest.mark.parametrize("is_interactive", [False, True])
def test_further_questions_do_not_read_the_files_again(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_interactive: bool,
) -> None:
    notes = tmp_path / "notes.txt"
    filler = "The river runs past the houses, they say; nobody counts them. " * 60
    facts = [f"The code for the {thing} is {code}. " for thing, code in CODES.items()]
    notes.write_text(f"{filler}{facts[0]}{filler}{facts[1]}{filler}")
    first, second = (f"What is the code for the {thing}?" for thing in CODES)
    words = ["ask", str(notes), first]
    words += ["--interactive"] if is_interactive else ["--also", second]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"\n{second}\n"))
    assert main([*words, "--filter-min-tokens", "512", "--max-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == list(CODES.values())
    first, second = [line for line in printed.err.splitlines() if "sieve at layer" in line]
    assert "read before" not in first
    assert "read before" in second


def test_an_unknown_option_is_told_with_those_that_may_have_been_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It came with the usage of `gemserve` itself, which has no options."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--name", "mine", "--keep=3", "--prot", "1"])
    said = capsys.readouterr().err
    assert said.startswith(
        "gemserve serve: error: unrecognized arguments: --name mine --keep=3 --prot 1; did you "
    )
    for option in ("--served-model-name", "--filter-keep", "--port"):
        assert option in said.splitlines()[0]
    assert said.splitlines()[1] == "gemserve serve --help lists all options"
    assert "usage" not in said
