"""What `gemserve serve` and `gemserve ask` print for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve.errors import ModelError


def test_serve_says_what_it_loads_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: nothing was printed until the model was there, which may take minutes."""

    def fail(*_: Any) -> Any:
        raise ModelError("stop here")

    monkeypatch.setattr("signal.signal", lambda *_: None)  # serve would change it for all tests
    monkeypatch.setattr(
        "gemserve.evaluation.calibration.calibrated_core.build_calibrated_core", fail
    )
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
