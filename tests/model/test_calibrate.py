"""Calibration: the layer it picks, where that is written, and that it is read again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gemserve.filtering.table import SELECTORS

from gemserve.calibration import read_filter_layer, write_calibration
from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.assemble import build_core
from gemserve.errors import ConfigError
from gemserve.evaluation.calibrate import Calibration, LayerResult, check_found, choose_layer
from gemserve.evaluation.example import Draw
from gemserve.evaluation.needle import SUBTASKS
from gemserve.evaluation.observe import observe
from gemserve.evaluation.score import generate
from gemserve.model.loader import BUILTIN_PATH
from gemserve.types import Budget, FilterParams


def results(*figures: tuple[float, float]) -> list[LayerResult]:
    return [
        LayerResult(layer=layer, score=score, recall=recall, distance=0.0, work=layer / 8)
        for layer, (score, recall) in enumerate(figures)
    ]


def test_the_earliest_layer_about_as_good_as_the_best_is_picked() -> None:
    assert choose_layer(results((0.1, 0), (0.95, 0), (0.955, 0), (0.9, 0)), 0.01) == 1
    assert choose_layer(results((0.1, 0), (0.94, 0), (0.955, 0), (0.9, 0)), 0.01) == 2


def test_a_model_that_answers_nothing_is_judged_by_what_was_kept() -> None:
    assert choose_layer(results((0.1, 0.2), (0.0, 0.9), (0.0, 0.4)), 0.01) == 1


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model if that can be; in the cache for a hub id."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    assert read_filter_layer(str(model), 40) is None
    assert write_calibration(str(model), {"filter_layer": 3}) == model / "calibration.json"
    assert read_filter_layer(str(model), 40) == 3
    for hub_id in ("some/model", "some-other/model"):
        assert read_filter_layer(hub_id, 40) is None
        path = write_calibration(hub_id, {"filter_layer": len(hub_id)})
        assert path.is_relative_to(tmp_path / "cache" / "gemserve")
        assert read_filter_layer(hub_id, 40) == len(hub_id)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text('{"layer": 3}')
    with pytest.raises(ConfigError, match=r"calibration\.json: no readable filter_layer"):
        read_filter_layer(str(tmp_path), 40)


def test_a_file_of_another_model_is_named(tmp_path: Path) -> None:
    write_calibration(str(tmp_path), {"filter_layer": 9})
    with pytest.raises(ConfigError, match=r"calibration\.json: filter_layer=9: the model has 7"):
        read_filter_layer(str(tmp_path), 7)


def test_every_layer_shows_what_the_engine_s_own_filter_pass_sees() -> None:
    """Calibrated is what is served: the layer's choice in one reading is the engine's."""
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=64 << 20, filter_min_tokens=0))
    layer = core.config.filter_layer
    assert layer is not None
    draw = Draw(seed=3, num_tokens=700, index=0, samples=1)
    example = SUBTASKS["multikey"](core.tokenizer, draw)
    selector = SELECTORS["sieve"]
    params = FilterParams(method="sieve", keep=96, return_selection=True)
    evidence = observe(core, example.prompt, selector.window(700))
    assert sorted(evidence) == list(range(core.model.num_layers))
    budget = Budget(low=96, high=96, limit=96)
    expected = selector.choose(evidence[layer], budget, params).positions.tolist()
    _, report = generate(core, example, example.prompt.ids, params)
    assert report.selection is not None
    assert [p for start, stop in report.selection for p in range(start, stop)] == expected


def test_the_command_writes_figures_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(BUILTIN_PATH, model)
    (model / "calibration.json").unlink()
    status = main(
        [
            *("calibrate", "--model", str(model), "--lengths", "256", "--samples", "1"),
            *("--keep", "64", "--out", str(out), "--json"),
        ]
    )
    assert status == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert read_filter_layer(str(model), 40) == last["filter_layer"]
    assert last["num_probes"] == 4
    assert [row["layer"] for row in last["layers"]] == list(range(8))
    works = [row["work"] for row in last["layers"]]
    assert works == sorted(works)
    assert json.loads((out / "calibration.json").read_text()) == last
    assert (out / "calibration.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--keep", "auto", "keep=auto: layers are compared at one budget"),
        ("--keep", "5000", "keep=5000: must leave out some of 1024 tokens"),
        ("--samples", "0", "samples=0: must be a whole number, at least 1"),
        ("--lengths", "99999", "lengths=99999: the longest prompt of this model is 32767"),
    ],
)
def test_options_out_of_range_are_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", option, value]) == 2
    assert message in capsys.readouterr().err


def test_probes_that_tell_nothing_write_nothing() -> None:
    """Layer 0 was written where all layers did equally well, or none."""

    def found(full: float, *rows: tuple[float, float]) -> Calibration:
        layers = tuple(results(*rows))
        return Calibration(filter_layer=0, full_score=full, num_probes=8, layers=layers)

    check_found(found(0.9, (0.3, 0.1), (0.8, 0.7)))
    check_found(found(0.0, (0.0, 0.1), (0.0, 0.7)))
    with pytest.raises(
        ConfigError, match=r"no layer's choice more than 0\.10: nothing was written"
    ):
        check_found(found(1.0, (0.1, 0.1), (0.0, 0.7)))
    for rows in (((1.0, 1.0), (1.0, 1.0)), ((0.0, 0.5), (0.0, 0.5))):
        with pytest.raises(ConfigError, match="all layers do equally well"):
            check_found(found(0.1, *rows))
