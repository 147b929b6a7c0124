"""The guide's example for Ollama's client; what else it can do is in programs/ollama.py."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environments import python_of
from tests.fakes import FakeCore
from tests.guide import examples, run_example

TEXT = "Héllo 🌍!"


def test_the_guide(url: str, folder: Path, core: FakeCore) -> None:
    (code,) = examples("ollama", "python")
    printed = run_example(code, "python", url=url, folder=folder, interpreter=python_of("ollama"))
    first, second = core.requests
    count = len(first.prompt_ids)
    assert printed == f"{TEXT}\n{count} tokens read\n{TEXT}"
    assert first.prompt_ids == second.prompt_ids
    assert first.sampling.temperature == 0
