"""The `llm` command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.clients.environments import script_of
from tests.fakes import FakeCore
from tests.guide import examples, run_example

TEXT = "Héllo 🌍!"


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    home = folder / "llm"
    home.mkdir()
    scripts = Path(script_of("llm", "llm")).parent
    return {"LLM_USER_PATH": str(home), "PATH": f"{scripts}:{os.environ['PATH']}"}


@pytest.mark.capability("llm", "chat", "stream")
def test_the_guide(url: str, folder: Path, core: FakeCore, environment: dict[str, str]) -> None:
    (code,) = examples("llm", "sh")
    printed = run_example(code, "sh", url=url, folder=folder, environment=environment)
    assert printed == f"{TEXT}\n"
    [request] = core.requests
    assert (request.filter.method, request.sampling.temperature) == ("sieve", 0)
    more = "llm --model gemserve --no-stream --system 'Be brief.' --option max_tokens 7 Hi >&2\n"
    logged = run_example(
        f"{more}llm logs --json --count 1", "sh", url=url, folder=folder, environment=environment
    )
    [entry] = json.loads(logged)
    assert entry["response"] == TEXT
    assert entry["response_json"]["filter"]["reason"] == "short_prompt"
    assert core.requests[1].sampling.max_tokens == 7
