"""A server whose answer is known, and a document long enough to be filtered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeCore, live_server, serving_over


@pytest.fixture
def url(core: FakeCore, tokenizer: Any) -> Iterator[str]:
    serving = serving_over(core, tokenizer, max_prompt_tokens=1900)
    with live_server(replace(serving, model_name="builtin")) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("The river runs past the houses. " * 150, encoding="utf-8")
    return tmp_path
