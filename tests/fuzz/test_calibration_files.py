"""A changed calibration is used or refused by name, and one in the cache keeps no model waiting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.calibration import files
from gemserve.calibration.files import Calibration, find_calibration, read_calibration
from gemserve.errors import ConfigError
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes, changed_json, written

NUM_LAYERS, NUM_HEADS = 30, 16
SHIPPED = [path.read_text("utf-8") for path in sorted(files._SHIPPED.glob("*.json"))]
EARLIER = '{"filter_layer": 3, "coverage_bound": 0.4, "second_look": true, "heads": [[3, 1]]}'


@st.composite
def changed_files(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from([*SHIPPED, EARLIER]))
    if draw(st.booleans()):
        return draw(changed_bytes(text.encode(), hot=400))
    return written(draw(changed_json(json.loads(text))))


def check(calibration: Calibration) -> None:
    assert 0 <= calibration.layer < NUM_LAYERS
    for layer, head in calibration.heads or ():
        assert 0 <= layer <= calibration.layer
        assert 0 <= head < NUM_HEADS
    assert 0 <= calibration.coverage_bound <= 1
    assert 0 <= calibration.window_bound <= 1
    assert 1 <= calibration.most_kept("auto", 5000) <= 5000
    assert calibration.describe()


@given(changed_files())
@cases(40, many_times=5)
def test_a_file_is_used_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    cache = tmp_path_factory.mktemp("cache")
    path = cache / "gemserve" / "calibrations" / "a.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with bounded("calibration file", cpu_s=5, grown_bytes=100 * MIB):
        try:
            check(read_calibration(path, num_layers=NUM_LAYERS, num_heads=NUM_HEADS))
        except ConfigError as error:
            assert str(path) in str(error)
            assert len(str(error).encode()) < 1500
    with bounded("", cpu_s=5), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        found = find_calibration("nowhere", model="m", weights="0" * 64, norms="none")
    assert found in (None, path)


def test_a_pipe_in_the_cache_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gemserve" / "calibrations" / "a.json"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_calibration("nowhere", model="m", weights="0" * 64) is None
    with pytest.raises(ConfigError, match=r"a\.json: cannot be read"):
        read_calibration(path, num_layers=NUM_LAYERS, num_heads=NUM_HEADS)
