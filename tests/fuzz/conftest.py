"""Writes how many cases each fuzz test has run to the file GEMSERVE_FUZZ_COUNTS."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fuzz.cases import COUNTS


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := os.environ.get("GEMSERVE_FUZZ_COUNTS"):
        Path(path).write_text(json.dumps(COUNTS), "utf-8")
