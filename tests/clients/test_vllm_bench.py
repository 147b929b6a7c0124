"""vLLM's load generator, `vllm bench serve`, from the environment of `make peers`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gemserve.model.loading.loader import BUILTIN_PATH
from tests.clients.environments import ROOT, offline_environment
from tests.clients.servers import Answers
from tests.fakes import FILTERED

SCRIPT = ROOT.with_name(".venv-peers") / "vllm" / "bin" / "vllm"
FILTER = {"filter": {"method": "sieve", "keep": 512}}

pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="vllm: `make peers` installs it"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def core() -> Answers:
    return Answers([FILTERED, "The", " river", " runs", " past", "."])


def bench(folder: Path, url: str, backend: str, path: str, *more: str) -> dict[str, Any]:
    """The report of a run of four requests."""
    flags = ["--backend", backend, "--base-url", url, "--endpoint", path, "--model", "builtin"]
    flags += ["--tokenizer", str(BUILTIN_PATH), "--dataset-name", "random"]
    flags += ["--random-input-len", "24", "--random-output-len", "5", "--num-prompts", "4"]
    flags += ["--max-concurrency", "1", "--disable-tqdm", "--save-result"]
    flags += ["--result-dir", str(folder), "--result-filename", "report.json"]
    done = subprocess.run(
        [str(SCRIPT), "bench", "serve", *flags, *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**offline_environment(folder), "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"},
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


@pytest.mark.capability("vllm bench serve", "stream", "filter")
def test_chats_and_the_filter(url: str, tmp_path: Path, core: Answers) -> None:
    extra = ("--extra-body", json.dumps(FILTER))
    report = bench(tmp_path, url, "openai-chat", "/v1/chat/completions", *extra)
    assert (report["completed"], report["failed"]) == (4, 0)
    assert report["total_output_tokens"] == 20
    assert {request.filter.keep for request in core.requests} == {512}


@pytest.mark.capability("vllm bench serve", "stream")
def test_completions(url: str, tmp_path: Path, core: Answers) -> None:
    """It names every option of a completion, those that are not set as well."""
    report = bench(tmp_path, url, "openai", "/v1/completions")
    assert (report["completed"], report["failed"]) == (4, 0)
    assert report["total_output_tokens"] == 20
