"""Whatever the cache holds of segments, answers are those of an engine without one.

More seeds: `GEMSERVE_TEST_SEGMENTS=0:2000 pytest tests/model/test_segment_interleavings.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cache_world import World
from tests.model.cache_traces import run_traces
from tests.model.segment_traces import SegmentTrace

FIRST, END = map(int, os.environ.get("GEMSERVE_TEST_WINDOWS", "0:8").split(":"))
pytestmark = pytest.mark.usefixtures("use_compiled_step")


def test_segment_interleavings(tmp_path: Path) -> None:
    total = run_traces(SegmentTrace, World(tmp_path), range(FIRST, END))
    count = END - FIRST
    assert total.answers > 6 * count
    assert 2 * total.cached_windows > count, "the traces hardly test what is found again"
    assert total.segments > 2 * total.cached_windows
    assert total.evictions > count // 2
    if count >= 50:
        assert total.disk_segments > count // 8, "the traces hardly test what is found on the disk"
