"""`gemserve ask` says when the model has failed."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from gemserve.cli.ask import _answer
from gemserve.contract.events import Finished, TextDelta
from gemserve.errors import GemserveError


def test_half_an_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It looked like a whole one, with status 0."""
    half = TextDelta(text="half", token_ids=(1,), drawn_s=0.0)
    end = Finished(reason="error", completion_tokens=1, error="boom")
    llm: Any = SimpleNamespace(stream=lambda *_, **__: iter([half, end]))
    given = argparse.Namespace(max_tokens=9, show_kept=False)
    prompt: Any = None
    with pytest.raises(GemserveError, match="the request failed: boom"):
        _answer(llm, prompt, given, None)
    assert capsys.readouterr().out == "half\n"
