"""Whatever happens to the document cache meanwhile, answers are those of an engine without one.

More seeds: `GEMSERVE_TEST_INTERLEAVINGS=0:2000 pytest tests/model/test_cache_interleavings.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cache_world import HAS_DISK, World
from tests.model.cache_traces import Outcome, Trace

FIRST, END = map(int, os.environ.get("GEMSERVE_TEST_INTERLEAVINGS", "3:11").split(":"))
pytestmark = pytest.mark.usefixtures("use_compiled_step")


def test_interleavings(tmp_path: Path) -> None:
    """Tenants, adapters loaded anew, chat turns, evictions, deletions, restarts on one folder…"""
    world, total = World(tmp_path), Outcome()
    for seed in range(FIRST, END):
        try:
            outcome = Trace(world, seed).run()
        except Exception as error:
            error.add_note(f"in the trace of seed {seed}")
            raise
        for name in Outcome.__slots__:
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        if seed % 50 == 49:
            print(f"{seed + 1 - FIRST} traces: {total}", file=sys.stderr, flush=True)
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
