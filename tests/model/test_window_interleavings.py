"""Whatever the cache holds of windows, answers are those of an engine without one.

More seeds: `GEMSERVE_TEST_WINDOWS=0:2000 pytest tests/model/test_window_interleavings.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cache_world import World
from tests.model.cache_traces import run_traces
from tests.model.window_traces import WindowTrace

FIRST, END = map(int, os.environ.get("GEMSERVE_TEST_WINDOWS", "0:8").split(":"))
pytestmark = pytest.mark.usefixtures("use_compiled_step")


def test_window_interleavings(tmp_path: Path) -> None:
    total = run_traces(WindowTrace, World(tmp_path), range(FIRST, END))
    count = END - FIRST
    assert total.answers > 6 * count
    assert 2 * total.cached_windows > count, "the traces hardly test what is found again"
    assert total.windows > 2 * total.cached_windows
    assert total.evictions > count // 2
    if count >= 50:
        assert total.disk_windows > count // 8, "the traces hardly test what is found on the disk"
