"""What earlier and later versions have left on the disk opens, or is refused in so many words.

The samples are those of tests/samples/make_samples.py.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.calibration.files import Calibration, read_calibration
from gemserve.cli.main import main
from gemserve.engine.cache.folder import CacheFolder
from gemserve.errors import AdapterError, ConfigError
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.samples.make_samples import SAMPLES


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("present", None),
        ("kv-1", "its format is gemserve-kv-1, not gemserve-kv-2"),
        ("newer", "its format is gemserve-kv-99, not gemserve-kv-2"),
    ],
)
def test_cache_files(
    name: str, told: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read is computed again, so such a file is removed, and that is told."""
    shutil.copytree(SAMPLES / "cache" / name, tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        folder = CacheFolder(tmp_path / "cache", 1 << 20)
    folder.close()
    assert len(folder) == (told is None)
    assert len(list((tmp_path / "cache").glob("kv-*"))) == len(folder)
    said = [record.getMessage() for record in caplog.records]
    if told is None:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"document cache: {tmp_path / 'cache' / 'kv-'}")
        assert line.endswith(f".safetensors is removed: {told}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "present",
            Calibration(
                layer=3,
                heads=((2, 1), (3, 3)),
                coverage_bound=0.4,
                window_bound=0.3,
                window=1536,
                auto_keep=128,
                is_measured=True,
            ),
        ),
        ("only_layer", Calibration(layer=2)),
        (
            "words",
            Calibration(
                layer=2,
                heads=((2, 1),),
                coverage_bound=0.3566,
                window=1536,
                is_measured=True,
                by_meaning=False,
            ),
        ),
        (
            "second_look",
            Calibration(
                layer=8,
                heads=((7, 7), (8, 0)),
                ends_with=False,
                coverage_bound=0.3941,
                window=1536,
                auto_keep=128,
                is_measured=True,
                by_meaning=False,
            ),
        ),
    ],
)
def test_calibrations_of_all_versions_until_now_are_read(name: str, expected: Calibration) -> None:
    path = SAMPLES / "calibration" / f"{name}.json"
    found = read_calibration(path, num_layers=32, num_heads=16)
    assert found == replace(expected, source=str(path))


def test_a_calibration_of_a_later_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its fields may mean other things, and a wrong layer answers wrongly without an error."""
    path = SAMPLES / "calibration" / "newer.json"
    told = (
        f"{path}: format=99: this version of gemserve reads format 1; delete the file, or write it "
        "anew with gemserve calibrate"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        read_calibration(path, num_layers=4, num_heads=4)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # serve would change it for all tests
    words = ["serve", "--device", "cpu", "--cpu-step", "off", "--kv-memory", "64MiB", "--port", "0"]
    assert main([*words, "--calibrate", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gemserve: {told}"


def test_an_adapter_of_a_later_version_is_refused(model: CausalModel) -> None:
    store = AdapterStore(model, SAMPLES / "adapter", 1 << 20)
    for name in ("present", "first"):
        assert store.load(name, name).num_bytes == 1024
    told = (
        "format=99: this version of gemserve reads format 1; make the adapter anew with gemserve "
        "adapter train or convert, or load it with the version that made it"
    )
    with pytest.raises(AdapterError, match=f"{re.escape(told)}$"):
        store.load("newer", "newer")
