"""What a server filters with: the calibration that is there, one made now, or a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.calibration.files import Calibration, find_calibration, write_calibration
from gemserve.calibration.search import calibrated_core
from gemserve.calibration.search.choose_layer import Effort
from gemserve.calibration.search.result import CalibrationResult, Trust
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterOptions
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.model.base_model import hash_weights
from gemserve.model.loading.loader import LoadedModel, load
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.model.test_calibrate import copied, few
from tests.model.test_head_search import MEMORY, layer_of
from tests.model.test_selection import NoText


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


FOUND = CalibrationResult(
    layers=(layer_of(1, 0.9),),
    chosen=layer_of(1, 0.9, heads=((0, 2), (1, 3))),
    trust=Trust(
        bound=0.25,
        window_bound=0.2,
        **dict.fromkeys(("found", "missed", "absent", "diffuse"), 0.5),
        **dict.fromkeys(("window_found", "window_missed", "window_absent", "window_diffuse"), 0.5),
    ),
    kinds=("number",),
    num_probes=4,
    prefers="quality",
    recalls={"number": 0.9},
    confirmed={},
    whole_s=(1.0, 9.0),
)
ENGINE = EngineConfig(kv_memory_bytes=MEMORY)


@pytest.fixture
def uncalibrated(tmp_path: Path) -> ModelConfig:
    return ModelConfig(model=str(copied(tmp_path / "model")))


def test_a_model_is_calibrated_once(
    uncalibrated: ModelConfig,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the user's cache, for its weights: not in the folder that the command was started in."""
    efforts: list[Effort] = []

    def find(core: Core, effort: Effort, progress: Any) -> CalibrationResult:
        efforts.append(effort)
        return FOUND

    monkeypatch.setattr(calibrated_core, "calibrate", find)
    monkeypatch.chdir(cache.parent)
    before = set(cache.parent.rglob("*"))
    expected = Calibration(
        layer=1,
        heads=((0, 2), (1, 3)),
        ends_with=False,
        coverage_bound=0.25,
        is_measured=True,
        window=Calibration.USUAL_SEGMENT,
        window_bound=0.2,
    )
    for _ in range(2):
        core = calibrated_core.build_calibrated_core(uncalibrated, ENGINE)
        assert replace(core.calibration, source=expected.source) == expected
        assert core.config.filter_layer == 1
        assert core.config.filter_keep == 1024
    assert efforts == [calibrated_core.SHORT]
    said = capsys.readouterr().err
    assert said.count("not calibrated yet") == said.count("kept in") == 1
    assert "warning" not in said
    new = [p for p in set(cache.parent.rglob("*")) - before if p.is_file()]
    (written,) = [p for p in new if p.parent.name != "checked"]
    assert written.is_relative_to(cache / "gemserve" / "calibrations")
    weights = hash_weights(core.model.hf, rounded=True)
    assert find_calibration(uncalibrated.model, model="other", weights=weights) == written


def test_a_calibration_is_used_where_no_folder_can_be_written(
    uncalibrated: ModelConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minutes of probes were thrown away, and the filter layer was a guess."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(calibrated_core, "calibrate", lambda *_: FOUND)
    began: list[bool] = []
    core = calibrated_core.build_calibrated_core(uncalibrated, ENGINE, lambda: began.append(True))
    assert began == [True]
    assert core.calibration.heads == FOUND.chosen.heads
    assert core.calibration.is_measured
    assert "not kept for the next start" in capsys.readouterr().err


@pytest.mark.parametrize(
    "engine",
    [
        replace(ENGINE, filter_layer=3),
        replace(ENGINE, filter_method="none"),
        replace(ENGINE, filter_method="snapkv", filter_keep=64),
    ],
    ids=["a layer is given", "none", "snapkv"],
)
def test_what_needs_no_calibration_makes_none(
    uncalibrated: ModelConfig, engine: EngineConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated_core, "calibrate", None)
    core = calibrated_core.build_calibrated_core(uncalibrated, engine)
    assert not core.calibration.is_measured
    assert not (cache / "gemserve" / "calibrations").exists()


def test_without_calibration_the_layer_is_a_guess_and_that_is_said(
    uncalibrated: ModelConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrated_core, "calibrate", None)
    off = replace(ENGINE, calibrate="off")
    core = calibrated_core.build_calibrated_core(uncalibrated, off)
    # other tests may have left handlers, which write what the log says
    lines = capsys.readouterr().err.splitlines()
    (said,) = (line for line in lines if line.startswith("gemserve:"))
    assert "warning: filter layer 3 is not calibrated (guessed from the depth)" in said
    assert core.config.filter_keep == "auto"
    params = core.planner.resolve(FilterOptions())
    assert (params.keep, params.fallback, params.layer) == ("auto", True, 3)


def test_a_calibration_file_is_used_and_a_wrong_one_refused(
    uncalibrated: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FOUND.as_json()))
    engine = replace(ENGINE, calibrate=str(path))
    core = calibrated_core.build_calibrated_core(uncalibrated, engine)
    assert core.calibration.heads == FOUND.chosen.heads
    assert core.calibration.source == str(path)
    assert "warning" not in capsys.readouterr().err
    path.write_text(json.dumps(FOUND.as_json() | {"heads": [[0, 99]]}))
    with pytest.raises(ConfigError, match=r"mine\.json: heads=\[\[0, 99\]\] must be"):
        calibrated_core.build_calibrated_core(uncalibrated, engine)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        calibrated_core.build_calibrated_core(
            uncalibrated, replace(ENGINE, calibrate=str(tmp_path / "none.json"))
        )


def test_probes_that_fail_leave_a_warning_and_a_guess(
    uncalibrated: ModelConfig,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server did not start, for want of a nicety."""
    few(monkeypatch, least_recall=1.1)
    short = Effort(lengths=(900,), samples=1, confirms=0, windows=0, answers=0)
    monkeypatch.setattr(calibrated_core, "SHORT", short)
    core = calibrated_core.build_calibrated_core(uncalibrated, ENGINE)
    said = capsys.readouterr().err
    assert "warning: the calibration failed: the best heads find" in said
    assert "warning: filter layer 3 is not calibrated (guessed from the depth)" in said
    assert core.config.filter_keep == "auto"
    assert not list(cache.rglob("*.json"))


def test_other_weights_under_the_same_name_are_calibrated_anew(tmp_path: Path) -> None:
    """A finetuned copy took over the file that lay beside the original."""
    model = copied(tmp_path / "model")
    loaded = load(ModelConfig(model=str(model)))
    result = calibrated_core.result_of(
        calibrated_core.about_model(loaded), FOUND, calibrated_core.SHORT, 1.0
    )
    (model / "calibration.json").write_text(json.dumps(result))
    assert assemble(loaded, ENGINE).calibration.is_measured
    with torch.no_grad():
        next(loaded.model.hf.parameters()).mul_(1.5)
    assert not assemble(loaded, ENGINE).calibration.is_measured


def test_another_quantisation_takes_the_calibration_and_says_so(
    tmp_path: Path, cache: Path
) -> None:
    """Its norms are the same, because files keep them in full."""
    model = copied(tmp_path / "model")
    loaded = load(ModelConfig(model=str(model)))
    result = calibrated_core.result_of(
        calibrated_core.about_model(loaded), FOUND, calibrated_core.SHORT, 1.0
    )
    write_calibration(cache / "gemserve" / "calibrations" / "one.json", result)
    assert assemble(loaded, ENGINE).calibration.is_of_these_weights
    with torch.no_grad():
        for parameter in loaded.model.hf.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.01)
    taken = assemble(loaded, ENGINE).calibration
    assert taken.heads == FOUND.chosen.heads
    assert not taken.is_of_these_weights
    assert "measured on other weights of this model" in taken.describe()
    with torch.no_grad():
        for name, parameter in loaded.model.hf.named_parameters():
            if "norm" in name:
                parameter.mul_(1.5)
    assert not assemble(loaded, ENGINE).calibration.is_measured


def test_a_random_model_starts_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = LoadedModel(
        model=CausalModel(models.build("llama")),
        tokenizer=NoText(),
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    core = assemble(loaded, ENGINE)
    assert core.calibration == Calibration(layer=2, source="guessed from the depth")
    assert core.config.filter_keep == "auto"
