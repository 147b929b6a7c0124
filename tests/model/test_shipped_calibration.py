"""The calibration that comes with gemserve is found for the model that it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemserve.calibration.files import find_calibration, read_calibration


@pytest.mark.parametrize(
    ("weights", "num_layers", "num_heads", "found"),
    [
        ("8f9640d8a9c1283a", 30, 9, (15, ((15, 6),))),
        ("fdd4cfec34e96f32", 24, 14, (6, ((6, 0),))),
        ("3e24749abe9e1cf8", 28, 12, (11, ((9, 8), (11, 3)))),
    ],
    ids=["SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B"],
)
def test_the_shipped_calibration_is_found(
    weights: str,
    num_layers: int,
    num_heads: int,
    found: tuple[int, tuple[tuple[int, int], ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = find_calibration("", model="", weights=weights)
    assert path is not None
    calibration = read_calibration(path, num_layers=num_layers, num_heads=num_heads)
    assert (calibration.layer, calibration.heads) == found
    assert calibration.by_meaning
