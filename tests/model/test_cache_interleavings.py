"""Whatever happens to the document cache meanwhile, answers are those of an engine without one.

More seeds: `GEMSERVE_TEST_INTERLEAVINGS=0:2000 pytest tests/model/test_cache_interleavings.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cache_world import HAS_DISK, World
from tests.model.cache_traces import Trace, run_traces

FIRST, END = map(int, os.environ.get("GEMSERVE_TEST_INTERLEAVINGS", "3:11").split(":"))
pytestmark = pytest.mark.usefixtures("use_compiled_step")


def test_interleavings(tmp_path: Path) -> None:
    """Tenants, adapters loaded anew, chat turns, evictions, deletions, restarts on one folder…"""
    total = run_traces(Trace, World(tmp_path), range(FIRST, END))
    count = END - FIRST
    assert total.answers > 6 * count
    assert total.hits > count, "the traces hardly test the cache"
    assert total.whole_hits > count // 2, "the traces hardly test prompts that are read whole"
    assert total.evictions > count // 2
    assert total.cancelled > count // 4
    assert total.forgotten > count // 2
    if HAS_DISK:
        assert total.restarts > count // 4
        assert total.disk_hits >= count // 20
