"""OpenTelemetry's instrumentation of OpenAI's SDK: the example of the guide."""

from __future__ import annotations

from pathlib import Path

from tests.clients.environments import python_of
from tests.clients.servers import TEXT
from tests.guide import examples, run_example


def test_the_guide(url: str, folder: Path) -> None:
    (code,) = examples("OpenTelemetry", "python")
    interpreter = python_of("agents")
    printed = run_example(code, "python", url=url, folder=folder, interpreter=interpreter)
    assert printed == f"{TEXT}\n"
