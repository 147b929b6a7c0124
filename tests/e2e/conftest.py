"""Whole servers decode with the compiled step, as users' servers do."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def step_is_compiled(use_compiled_step: None) -> None:
    """If there is a compiler."""
