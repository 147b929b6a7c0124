"""What commands tell of a model's calibration and of its context, before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gemserve.calibration.files import Calibration, place_for
from gemserve.cli.main import main
from tests import models


def test_a_calibration_is_told_in_one_line() -> None:
    """A user whose answers are wrong must see whether the layer was measured or guessed."""
    measured = Calibration(
        layer=7, heads=((2, 4), (7, 7)), coverage_bound=0.4, source="c.json", is_measured=True
    )
    assert measured.describe() == (
        "filter layer 7 is calibrated by c.json: heads 2.4, 7.7 look (layer.head), and a coverage "
        "below 0.40 (0.34 of documents that are read in windows) is not trusted"
    )
    guessed = Calibration(layer=3, source="guessed from the depth").describe()
    assert (
        guessed == "filter layer 3 is not calibrated (guessed from the depth): all its heads look"
    )


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_plan_tells_where_its_layer_comes_from(
    is_calibrated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.save("llama", tmp_path)
    beside = model / "calibration.json"
    if is_calibrated:
        beside.write_text(json.dumps({"filter_layer": 1, "heads": [[1, 0]], "coverage_bound": 0.3}))
    capsys.readouterr()  # what saving the model printed
    assert main(["plan", "--model", str(model), "--tokens", "100", "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out.splitlines()[-1])
    if is_calibrated:
        assert f"filter layer 1 is calibrated by {beside}: heads 1.0 look" in printed.out
        assert (told["layer"], told["calibration"]) == (1, str(beside))
    else:
        assert "is not calibrated (guessed from the depth)" in printed.out
    assert printed.err == ""


def test_plan_warns_beyond_the_models_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It told the costs of a prompt that a server would refuse, and nothing else."""
    model = models.save("llama", tmp_path)
    config = json.loads((model / "config.json").read_text())
    context = config["max_position_embeddings"]
    assert main(["plan", "--model", str(model), "--tokens", str(context)]) == 0
    warned = capsys.readouterr().err
    assert f"tokens={context:,} does not fit into the model's context of {context:,}" in warned
    assert "a server refuses such prompts" in warned
    assert main(["plan", "--model", str(model), "--tokens", str(context - 1)]) == 0
    assert capsys.readouterr().err == ""


def test_plan_has_a_row_for_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.save("llama", tmp_path)
    asked = ["plan", "--model", str(model), "--tokens", "5000", "--json"]
    for window, sizes in (("auto", [None]), ("off", [None]), ("512", [None, 512])):
        assert main([*asked, "--window", window]) == 0
        printed = capsys.readouterr().out
        rows = json.loads(printed.splitlines()[-1])["rows"]
        assert [row["window"] for row in rows if row["method"] == "sieve"] == sizes
        assert ("sieve, windows of 512" in printed) == (window == "512")
    assert main([*asked, "--window", "5"]) == 2
    assert 'window=5: must be a count of tokens from 256 to 1048576, "auto" or "off"' in (
        capsys.readouterr().err
    )


def test_a_calibration_is_not_left_where_a_command_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No source is the cache, not the folder that "" means to the file system."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    place = place_for("", "abc")
    assert place == tmp_path / "cache" / "gemserve" / "calibrations" / "abc.json"
