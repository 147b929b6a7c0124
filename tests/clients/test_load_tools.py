"""Load generators of others: guidellm and aiperf."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gemserve.model.loading.loader import BUILTIN_PATH
from tests.clients.environments import offline_environment, script_of
from tests.clients.servers import Answers
from tests.fakes import FILTERED

ANSWER = [FILTERED, "The", " river", " runs", " past", "."]
FILTER = {"filter": {"method": "sieve", "keep": 512}}


@pytest.fixture
def core() -> Answers:
    return Answers(ANSWER)


def run_tool(tool: str, folder: Path, *arguments: str) -> None:
    script = script_of("load", tool)
    environment = offline_environment(folder)
    environment["PATH"] = f"{Path(script).parent}:{environment['PATH']}"
    if tool == "aiperf":
        # with it, a tokenizer's folder is taken for the name of a repository
        del environment["HF_HUB_OFFLINE"]
    done = subprocess.run(
        [script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def guidellm(folder: Path, url: str, *, streams: bool = True, **backend: Any) -> dict[str, Any]:
    """The one benchmark of a run of four requests."""
    target = {"kind": "openai_http", "target": url, "model": "builtin", "stream": streams}
    data = {"kind": "synthetic_text", "prompt_tokens": 24, "output_tokens": 5}
    named: dict[str, Any] = {
        "--backend": {**target, **backend},
        "--profile": {"kind": "synchronous"},
        "--constraint": {"kind": "max_requests", "count": 4},
        "--data": data,
        "--tokenizer": {"kind": "huggingface_auto", "model": str(BUILTIN_PATH)},
        "--output": {"kind": "json", "path": str(folder / "report.json")},
    }
    flags = [word for name, value in named.items() for word in (name, json.dumps(value))]
    run_tool("guidellm", folder, "run", *flags, "--disable-console")
    [benchmark] = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    found: dict[str, Any] = benchmark
    return found


@pytest.mark.capability("guidellm", "stream")
@pytest.mark.timeout(300)
def test_guidellm(url: str, folder: Path, core: Answers) -> None:
    """It always asks for usage in every chunk."""
    benchmark = guidellm(folder, url)
    assert benchmark["metrics"]["request_totals"]["successful"] == 4
    assert benchmark["metrics"]["request_totals"]["errored"] == 0


@pytest.mark.capability("guidellm", "chat", "filter")
@pytest.mark.timeout(300)
def test_guidellm_without_streams(url: str, folder: Path, core: Answers) -> None:
    benchmark = guidellm(folder, url, streams=False, extras={"body": FILTER})
    assert benchmark["metrics"]["request_totals"]["successful"] == 4
    assert {request.filter.keep for request in core.requests} == {512}


def aiperf(folder: Path, url: str, *more: str) -> dict[str, Any]:
    flags = ["--model", "builtin", "--url", url, "--endpoint-type", "chat"]
    flags += ["--tokenizer", str(BUILTIN_PATH), "--isl", "24", "--osl", "5"]
    flags += ["--request-count", "4", "--concurrency", "1", "--ui", "none"]
    flags += ["--artifact-dir", str(folder / "report"), "--no-gpu-telemetry"]
    run_tool("aiperf", folder, "profile", *flags, *more)
    [report] = (folder / "report").rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


@pytest.mark.capability("aiperf", "stream")
@pytest.mark.timeout(300)
def test_aiperf(url: str, folder: Path, core: Answers) -> None:
    report = aiperf(folder, url, "--streaming")
    assert report["request_count"]["avg"] == 4
    assert "time_to_first_token" in report


@pytest.mark.capability("aiperf", "chat", "filter")
@pytest.mark.timeout(300)
def test_aiperf_without_streams(url: str, folder: Path, core: Answers) -> None:
    report = aiperf(folder, url, "--extra-inputs", json.dumps(FILTER))
    assert report["request_count"]["avg"] == 4
    assert {request.filter.keep for request in core.requests} == {512}
