"""The calibration that comes with gemserve is found for the model that it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemserve.calibration.files import find_calibration, read_calibration


def test_the_shipped_calibration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = find_calibration("", model="smollm2", weights="8f9640d8a9c1283a")
    assert path is not None
    calibration = read_calibration(path, num_layers=30, num_heads=9)
    assert (calibration.layer, calibration.heads) == (8, ((7, 7), (8, 0)))
