"""Whatever the cache holds of windows, answers are those of an engine without one.

More seeds: `GEMSERVE_TEST_WINDOWS=0:2000 pytest tests/model/test_window_interleavings.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cache_world import World
from tests.model.cache_traces import Outcome
from tests.model.window_traces import WindowTrace

FIRST, END = map(int, os.environ.get("GEMSERVE_TEST_WINDOWS", "0:8").split(":"))
pytestmark = pytest.mark.usefixtures("use_compiled_step")


def test_window_interleavings(tmp_path: Path) -> None:
    world, total = World(tmp_path), Outcome()
    for seed in range(FIRST, END):
        try:
            outcome = WindowTrace(world, seed).run()
        except Exception as error:
            error.add_note(f"in the trace of seed {seed}")
            raise
        for name in Outcome.__slots__:
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        if seed % 50 == 49:
            print(f"{seed + 1 - FIRST} traces: {total}", file=sys.stderr, flush=True)
    count = END - FIRST
    assert total.answers > 6 * count
    assert 2 * total.cached_windows > count, "the traces hardly test what is found again"
    assert total.windows > 2 * total.cached_windows
    assert total.evictions > count // 2
    if count >= 50:
        assert total.disk_windows > count // 8, "the traces hardly test what is found on the disk"
