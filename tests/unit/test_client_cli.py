"""`gemserve-client` in pipes, on a terminal, and where there is no server."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.ask import summary_of
from gemserve.contract.filter_plan import FilterReason
from gemserve.contract.reports import FilterReport
from gemserve.engine.sequence.progress import Progress
from gemserve_client.address import redact
from gemserve_client.cli import ask
from gemserve_client.cli.main import main
from gemserve_client.replies import FilterReport as ClientReport
from tests.fakes import FILTERED, FakeCore, live_server, serving_over, wait_for

QUESTION = "Who?"
ANSWER = "Héllo 🌍!\n"


@pytest.fixture
def url(core: FakeCore, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with live_server(serving_over(core, tokenizer)) as address:
        monkeypatch.setenv("GEMSERVE_URL", address)
        yield address


@pytest.fixture
def notes(tmp_path: Path) -> str:
    path = tmp_path / "notes.txt"
    path.write_text("The river runs. " * 100, encoding="utf-8")
    return str(path)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gemserve_client.cli.main", *words]


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        command(*words), input=stdin, capture_output=True, encoding="utf-8", timeout=60, check=False
    )


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        status = main(words)
    return subprocess.CompletedProcess(words, status, printed.getvalue(), errors.getvalue())


def start(*words: str, **streams: Any) -> subprocess.Popen[bytes]:
    # whoever runs the tests in the background makes them, and what they start, ignore Ctrl-C
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command(*words), preexec_fn=hears, **streams)


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[int, str, int]:
    """Status, answer, and how many lines stderr has."""
    return done.returncode, done.stdout, len(done.stderr.splitlines())


def test_only_the_answer_is_on_stdout(url: str, notes: str, core: FakeCore) -> None:
    done = run("ask", notes, "-", QUESTION, "--filter", "gemfilter", "--keep", "32", stdin="Béa.")
    assert outcome(done) == (0, ANSWER, 1)
    assert re.fullmatch(r"gemfilter at layer 2 kept 32 of \d+ tokens in 2 ms\n", done.stderr)
    [request] = core.requests
    assert (request.filter.method, request.filter.keep) == ("gemfilter", 32)
    assert request.sampling.temperature == 0
    whole = run("ask", "-", QUESTION, "--filter", "none", "--max-tokens", "7", stdin="Short.")
    assert whole.stdout == ANSWER
    assert re.fullmatch(r"read all \d+ tokens \(there is no filter\)\n", whole.stderr)
    assert core.requests[1].sampling.max_tokens == 7


SUMMARIES: list[tuple[FilterReason | None, int, float | None, str]] = [
    (None, 512, 0.714, "sieve at layer 8 kept 512 of 6,012 tokens in 900 ms, coverage 0.71"),
    (None, 512, None, "sieve at layer 8 kept 512 of 6,012 tokens in 900 ms"),
    (
        "diffuse_attention",
        6012,
        0.21,
        "read all 6,012 tokens (attention was diffuse: coverage 0.21)",
    ),
    (
        "widened",
        4000,
        0.2,
        "sieve at layer 8 kept 4,000 of 6,012 tokens in 900 ms "
        "(attention was diffuse: coverage 0.20)",
    ),
    ("short_prompt", 6012, None, "read all 6,012 tokens (it is short)"),
    ("disabled", 6012, None, "read all 6,012 tokens (there is no filter)"),
    ("prompt_logprobs", 6012, None, "read all 6,012 tokens (all of its tokens are scored)"),
    ("error", 6012, None, "read all 6,012 tokens (the filter failed)"),
]


@pytest.mark.parametrize(("reason", "kept", "coverage", "line"), SUMMARIES)
def test_both_commands_tell_the_same(
    reason: FilterReason | None, kept: int, coverage: float | None, line: str
) -> None:
    """Whoever reads that all was read must see why, and how far the choice was from trusted."""
    report = FilterReport(
        method="sieve",
        applied=reason in (None, "widened"),
        reason=reason,
        layer=8,
        prompt_tokens=6012,
        kept_tokens=kept,
        cached_tokens=0,
        filter_ms=900.3,
        selection=None,
        coverage=coverage,
    )
    assert summary_of(report) == line
    assert ask.summary_of(ClientReport.model_validate(asdict(report))) == line
    cached = replace(report, cached_tokens=5000)
    assert ("; 5,000 were read before" in summary_of(cached)) == cached.applied
    assert ask.summary_of(ClientReport.model_validate(asdict(cached))) == summary_of(cached)
    in_windows = replace(cached, window=512, windows=1200, cached_windows=7)
    has_windows = "; 1,200 windows, 7 read before" in summary_of(in_windows)
    assert has_windows == cached.applied
    assert ask.summary_of(ClientReport.model_validate(asdict(in_windows))) == summary_of(in_windows)


def test_an_answer_has_a_limit(url: str, notes: str, core: FakeCore) -> None:
    """A small model can go on and on: without a limit of its own the command would wait for it."""
    assert call("ask", notes, QUESTION).returncode == 0
    assert core.requests[0].sampling.max_tokens == 256


def test_the_document_reaches_the_model(url: str, core: FakeCore, tokenizer: Any) -> None:
    """Standard input is UTF-8, with or without a byte order mark, whatever the locale."""
    assert run("ask", "-", "Où?", stdin="\ufeffBéa 🌍").returncode == 0
    assert "Béa 🌍\n\nOù?" in tokenizer.decode(core.requests[0].prompt_ids)
    assert "\ufeff" not in tokenizer.decode(core.requests[0].prompt_ids)


def test_kept_passages_are_shown(url: str, notes: str) -> None:
    done = call("ask", notes, QUESTION, "--keep", "32", "--show-kept")
    assert done.stdout == ANSWER
    report, passage, *_ = done.stderr.splitlines()
    assert re.search(r"kept \d+ of", report)
    assert re.match(r"\[0:34\] '.*The river runs", passage)


def test_lists(url: str) -> None:
    assert outcome(call("models")) == (0, "fake\n", 0)
    assert outcome(call("adapters", "list")) == (0, "", 0)
    for words, status in ((["load", "a", "b"], 400), (["unload", "a"], 404)):
        done = call("adapters", *words)
        assert outcome(done) == (1, "", 1)
        assert re.search(rf"gemserve-client: .* \(status {status}, [A-Z]+ http", done.stderr)


def test_failures_of_the_server(url: str, notes: str, core: FakeCore) -> None:
    refused = call("ask", notes, QUESTION, "--keep", "3")
    assert outcome(refused) == (1, "", 1)
    assert refused.stderr.startswith("gemserve-client: filter.keep=3: must be")
    assert "(status 400, POST http://127.0.0.1:" in refused.stderr
    core.script = (FILTERED, "a", ValueError("boom"))
    broken = call("ask", notes, QUESTION)
    assert outcome(broken) == (1, "a", 2)
    assert "gemserve-client: The request failed: ValueError: boom\n" in broken.stderr


def test_no_server(notes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        nobody = f"http://127.0.0.1:{closed_soon.getsockname()[1]}"
    done = run("ask", notes, QUESTION, "--url", nobody)
    assert outcome(done) == (1, "", 1)
    assert done.stderr.startswith(f"gemserve-client: no answer from {nobody}/v1: ")
    with_secrets = nobody.replace("//", "//me:secret-1@") + "/v1?key=secret-2"
    done = run("models", "--url", with_secrets)
    assert done.returncode == 1
    assert "secret" not in done.stderr
    assert redact(f"{with_secrets} 'x'") == f"{nobody.replace('//', '//***@')}/v1?*** 'x'"


def test_a_method_that_the_server_does_not_have(url: str, notes: str) -> None:
    """The server knows its methods, and its message names them."""
    done = run("ask", notes, QUESTION, "--filter", "best")
    assert outcome(done) == (1, "", 1)
    assert "filter.method='best': Input should be 'none', 'gemfilter', 'sieve'" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ask", "-"], "the following arguments are required: QUESTION"),
        (["ask", "/nowhere", "?"], "gemserve-client: /nowhere: No such file or directory"),
        (["ask", "-", "?"], "gemserve-client: FILE: must not be empty"),
        (["ask", os.devnull, "?"], "gemserve-client: FILE: must not be empty"),
        (["ask", "-", "?", "--keep", "nan"], "argument --keep: 'nan' must be a number or auto"),
        (["models", "--url", "localhost:8000"], "url=localhost:8000: must look like http://"),
        (["models", "--api-key", "clé"], "api key: must be printable ASCII"),
        (["load", "--url", "http://x"], "gemserve-client load: needs --url and --requests"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes(
    words: Sequence[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        try:
            status: object = main(words)
        except SystemExit as stopped:
            status = stopped.code
    assert status == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_text_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    assert main(["ask", str(path), "?"]) == 2
    assert capsys.readouterr().err == f"gemserve-client: {path}: is not UTF-8 text\n"


def test_a_reader_who_leaves_ends_it_quietly(url: str, notes: str, core: FakeCore) -> None:
    """As `| head -c 1` does: no traceback, and the server stops working on the answer."""
    core.script = (FILTERED, "first", *(["more"] * 50 + [0.01]) * 100, threading.Event())
    program = start("ask", notes, QUESTION, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.read(5) == b"first"
    program.stdout.close()
    assert program.wait(20) == 141
    assert len(program.stderr.read().splitlines()) == 1
    program.stderr.close()
    wait_for(core.cancelled.is_set)


def test_ctrl_c_ends_it_quietly(url: str, notes: str, core: FakeCore) -> None:
    core.script = (FILTERED, "first", threading.Event())
    program = start("ask", notes, QUESTION, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.read(5) == b"first"
    program.send_signal(signal.SIGINT)
    printed, errors = program.communicate(timeout=60)
    assert (program.returncode, printed) == (130, b"")
    assert len(errors.splitlines()) == 1
    wait_for(core.cancelled.is_set)


def test_a_terminal_shows_that_something_happens(url: str, notes: str, core: FakeCore) -> None:
    filtering = threading.Event()
    half = Progress(phase="filter", tokens=50, total=100, eta_s=2.0)
    core.script = (half, filtering, FILTERED, "ok")
    ours, theirs = pty.openpty()
    program = start("ask", notes, QUESTION, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's way to say that the other end was closed
        while part := os.read(ours, 4096):
            shown += part
            if b"(50%)" in shown:
                filtering.set()
    os.close(ours)
    assert program.communicate(timeout=20)[0] == b"ok\n"
    lines = shown.decode().split("\r\x1b[K")
    assert re.fullmatch(r"(reading|waiting for the server) 0\.\d s", lines[1])
    seen = [line for line in lines if "(50%)" in line]
    assert re.fullmatch(r"filtering: 50 of 100 tokens \(50%\), about 2 s left; [\d.]+ s", seen[0])
    assert re.fullmatch(r"sieve at layer 2 kept \d+ of \d+ tokens in 2 ms\r\n", lines[-1])


def test_what_is_needed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main(["models"]) == 1
    message = "gemserve-client: needs openai: pip install 'gemserve[client]'\n"
    assert capsys.readouterr().err == message
