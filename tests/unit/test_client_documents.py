"""`gemserve-client documents`, and questions about stored documents, over a scripted server."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemserve_client.cli.main import main
from tests.fakes import FILTERED, FakeCore, live_server, serving_over

ID = r"doc-[0-9a-f]{32}"
TEXT = "The river runs. " * 60


@pytest.fixture(autouse=True)
def url(core: FakeCore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    core.script = (FILTERED, "fine")
    with live_server(serving_over(core, tokenizer)) as address:
        monkeypatch.setenv("GEMSERVE_URL", address)
        yield address


@pytest.fixture
def notes(tmp_path: Path) -> str:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status, standard output and standard error."""
    status = main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_document_s_life(notes: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "documents", "add", notes, "--wait", "--pin", "--ttl", "90", "--system", "Be brief."
    )
    document_id = out.strip()
    assert status == 0
    assert re.fullmatch(ID, document_id)
    assert re.fullmatch(r"notes.txt: \d+ tokens, ready, \d+ cached, pinned, until \S+ \S+\n", err)
    status, out, _ = run(capsys, "documents", "list")
    assert (status, out) == (0, f"{document_id}\t{err}")
    status, out, _ = run(capsys, "documents", "show", document_id)
    shown = json.loads(out)
    assert (shown["id"], shown["name"]) == (document_id, "notes.txt")
    assert shown["expires_at"] - shown["created_at"] == 90
    assert run(capsys, "documents", "delete", document_id) == (0, "", "")
    status, out, err = run(capsys, "documents", "delete", document_id)
    assert (status, out) == (1, "")
    assert "no such document" in err
    assert "status 404" in err


def test_several_files_are_stored_one_by_one(
    notes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], core: FakeCore
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Other. " * 60)
    status, out, _ = run(capsys, "documents", "add", notes, str(other), "--wait")
    assert status == 0
    assert len(set(out.split())) == 2
    assert len(core.requests) == 2
    assert run(capsys, "documents", "add", notes, str(other), "--name", "x")[0] == 2
    empty = tmp_path / "empty"
    empty.touch()
    assert run(capsys, "documents", "add", notes, str(empty))[0] == 2  # and nothing is sent
    assert len(run(capsys, "documents", "list")[1].splitlines()) == 2


def test_a_warm_up_that_fails_is_told(
    notes: str, capsys: pytest.CaptureFixture[str], core: FakeCore
) -> None:
    core.script = (ValueError("boom"),)
    status, out, err = run(capsys, "documents", "add", notes, "--wait")
    assert status == 1
    assert re.fullmatch(rf"{ID}\n", out)
    assert "boom" in err.splitlines()[-1]


def test_a_stored_document_is_asked_like_its_file(
    notes: str, capsys: pytest.CaptureFixture[str], core: FakeCore
) -> None:
    """Otherwise the same question would get two answers, and find nothing in the cache."""
    document_id = run(capsys, "documents", "add", notes, "--wait")[1].strip()
    core.requests.clear()
    for first in (notes, document_id):
        assert run(capsys, "ask", first, "Who?")[:2] == (0, "fine\n")
    by_file, by_id = core.requests
    assert by_file.prompt_ids == by_id.prompt_ids
    core.requests.clear()
    for first in (notes, document_id):
        assert run(capsys, "ask", first, notes, "Who?", "--keep", "32")[0] == 0
    by_file, by_id = core.requests
    assert by_file.prompt_ids == by_id.prompt_ids


def test_further_questions_come_from_standard_input(
    notes: str,
    capsys: pytest.CaptureFixture[str],
    core: FakeCore,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Where?\n\n  When? \n"))
    status, out, err = run(capsys, "ask", notes, "Who?", "--interactive")
    assert (status, out) == (0, "fine\n" * 3)
    assert len(err.splitlines()) == 3
    prompts = [tokenizer.decode(request.prompt_ids) for request in core.requests]
    assert [re.findall(r"\n\n(\w+\?)<", prompt) for prompt in prompts] == [
        ["Who?"],
        ["Where?"],
        ["When?"],
    ]
    status, out, err = run(capsys, "ask", "-", "Who?", "--interactive")
    assert (status, out) == (2, "")
    assert "no FILE can be -" in err
