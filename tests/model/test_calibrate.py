"""Calibration on models: what is read, what is written, and that it is what the engine sees."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.calibration.files import read_calibration
from gemserve.calibration.search import choose_keep, probes
from gemserve.calibration.search import choose_layer as calibration
from gemserve.calibration.search.choose_layer import Effort, calibrate
from gemserve.calibration.search.observe import observe
from gemserve.calibration.search.probes import PROBE_KINDS, draw_probes
from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import build_core
from gemserve.evaluation.run import generate
from gemserve.evaluation.tasks.example import ExampleDraw
from gemserve.evaluation.tasks.needle import SUBTASKS
from gemserve.filter_plan import Budget
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.sieve import Sieve
from gemserve.model.causal_model import CausalModel
from gemserve.model.loader import BUILTIN_PATH
from gemserve.prompting.prompt import Prompt
from gemserve.types import FilterParams
from tests import models
from tests.model.test_head_search import MEMORY, core_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_layer_shows_what_the_engine_s_own_filter_pass_sees() -> None:
    """Calibrated is what is served: the heads' choice in one reading is the engine's."""
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_min_tokens=0))
    found, selector = core.calibration, Sieve()
    assert found.is_measured
    draw = ExampleDraw(seed=3, num_tokens=700, index=0, samples=1)
    example = SUBTASKS["multikey"](core.tokenizer, draw)
    params = FilterParams(method="sieve", keep=96, return_selection=True)
    prompt = example.prompt
    rows = selector.rows(len(prompt.ids), prompt.question, found.ends_with)
    (evidence,) = observe(core, [prompt], [rows])
    assert list(evidence.layers) == list(range(core.model.num_layers))
    always = count_always_read(prompt.protected, len(prompt.ids))
    size = 96 + always
    budget = Budget(low=size, high=size, limit=size, protected=always)
    evidence = replace(
        evidence,
        layers={i: e for i, e in evidence.layers.items() if i <= found.layer},
        heads=found.heads,
        coverage_bound=found.coverage_bound,
    )
    choice = selector.choose(evidence, budget, params)
    _, report = generate(core, example, prompt.ids, params)
    assert report.selection is not None
    kept = [p for start, stop in report.selection for p in range(start, stop)]
    assert kept == choice.positions.tolist()
    assert report.coverage == pytest.approx(choice.coverage, abs=1e-3)


def test_layers_with_windows_are_not_observed_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short probes fit a window of thousands of tokens; the prompts it then filtered did not."""
    core = core_of(CausalModel(models.build("llama")))
    prompt = Prompt(ids=torch.randint(6, models.VOCAB, (300,)).tolist(), protected=())
    for windows, expected in (
        ((None, 500, 100, None), [0, 3]),
        ((500, 100, 500, 299), [0, 2]),
    ):
        monkeypatch.setattr(CausalModel, "sliding_windows", windows)
        (evidence,) = observe(core, [prompt], [[299]])
        assert list(evidence.layers) == expected


def few(monkeypatch: pytest.MonkeyPatch, least_recall: float = 0.0) -> None:
    """Two kinds of probe instead of seven, and nothing that is refused for its recall."""
    monkeypatch.setattr(probes, "PROBE_KINDS", ("number", "multikey"))
    monkeypatch.setattr(calibration, "PROBE_KINDS", ("number", "multikey"))
    monkeypatch.setattr(calibration, "LEAST_RECALL", least_recall)
    monkeypatch.setattr(calibration, "FINDABLE", 0.0)


def copied(folder: Path) -> Path:
    """The built-in model without its calibration."""
    shutil.copytree(BUILTIN_PATH, folder)
    (folder / "calibration.json").unlink()
    return folder


def test_the_command_writes_figures_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    model, out = copied(tmp_path / "model"), tmp_path / "out"
    options = ("--lengths", "256", "--samples", "1", "--confirm", "1", "--answers", "2")
    asked = ["calibrate", "--model", str(model), *options, "--out", str(out), "--json"]
    assert main(asked) == 0
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert json.loads((model / "calibration.json").read_text()) == last
    assert json.loads((out / "calibration.json").read_text()) == last
    assert (out / "calibration.png").stat().st_size > 5000
    found = read_calibration(model / "calibration.json", num_layers=8, num_heads=4)
    assert found.is_measured
    assert last["probes"]["count"] == 2
    assert last["probes"]["kinds"] == ["number", "multikey"]
    assert [row["layer"] for row in last["layers"]] == list(range(8))
    works = [row["work"] for row in last["layers"]]
    assert works == sorted(works)
    best, *others = last["keeps"]
    assert (best["keep"], best["second_look"]) == (last["auto_keep"], last["second_look"])
    assert {row["keep"] for row in last["keeps"]} == set(choose_keep.KEEPS)
    (told,) = (line for line in printed if line.endswith("← chosen for keep: auto"))
    assert told.startswith(f"{last['auto_keep']:,} tokens kept")
    assert sum("tokens kept" in line for line in printed) == 1 + len(others)
    scored = [row["layer"] for row in last["layers"] if row["score"] is not None]
    assert last["filter_layer"] in scored
    # a server over the same weights uses it
    core = build_core(ModelConfig(model=str(model)), EngineConfig(kv_memory_bytes=MEMORY))
    assert core.calibration == found
    assert core.config.filter_keep == 1024


def test_probes_are_of_every_kind_and_their_answers_are_in_the_document(tokenizer: Any) -> None:
    drawn = draw_probes(tokenizer, "calibration", [400], 1, seed=0)
    assert tuple(probe.kind for probe in drawn) == PROBE_KINDS
    for probe in drawn:
        ids = probe.example.prompt.ids
        assert probe.example.gold
        assert all(0 < start < stop <= len(ids) for start, stop in probe.example.gold)
        assert all(prompt.question for prompt in probe.prompts)
        shared = 0
        for a, b in zip(ids, probe.absent.ids, strict=False):
            if a != b:
                break
            shared += 1
        assert shared > 250  # a document is read once
    again = draw_probes(tokenizer, "calibration", [400], 1, seed=0)
    assert [p.example.prompt.ids for p in again] == [p.example.prompt.ids for p in drawn]


class Interrupted:
    """Ctrl-C after so many probes."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, what: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupt_chooses_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    settings = EngineConfig(kv_memory_bytes=MEMORY, filter_method="none")
    core = build_core(ModelConfig(), settings)
    effort = Effort(lengths=(200,), samples=2, confirms=1)
    with pytest.raises(KeyboardInterrupt):
        calibrate(core, effort, Interrupted(1))  # of one kind alone
    found = calibrate(core, effort, Interrupted(2))
    assert found.num_probes == 2
    assert (found.confirmed_recall, found.full_score) == (None, None)
    assert found.chosen in found.layers
    assert found.windows == found.keeps == ()
    assert found.is_partial
    # these used to be 0, as if nothing were ever mistrusted
    assert (found.trust.found, found.trust.absent, found.trust.diffuse) == (None, None, None)


@pytest.mark.parametrize("count", [3, 4])
def test_an_interrupt_while_the_choice_is_confirmed_keeps_the_choice(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It used to end in nothing, although every probe that chooses had been read."""
    few(monkeypatch)
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_method="none"))
    found = calibrate(core, Effort(lengths=(200,), samples=1, confirms=1), Interrupted(count))
    assert found.is_partial
    assert found.full_score is None


def interrupted_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, earlier: Path | None
) -> int:
    """`gemserve calibrate`, interrupted; `earlier`: the calibration that the model has."""
    few(monkeypatch)
    real = calibration.calibrate
    monkeypatch.setattr(
        "gemserve.calibration.search.calibrated_core.calibrate",
        lambda core, effort, progress: real(core, effort, Interrupted(2)),
    )
    monkeypatch.setattr("gemserve.engine.build.calibration_path", lambda *_: earlier)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--lengths", "200", "--samples", "1", "--kv-memory", "256MiB"]
    return main(["calibrate", *options])


def test_a_part_replaces_no_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to replace the server's, and to print figures that nobody had measured as 0%."""
    earlier = tmp_path / "earlier"
    shutil.copy(BUILTIN_PATH / "calibration.json", earlier)
    assert interrupted_command(monkeypatch, tmp_path, earlier) == 130
    assert list(tmp_path.rglob("*.json")) == []
    said = capsys.readouterr().out
    assert "nothing was written" in said
    assert "how often that errs was not measured" in said
    assert "0%" not in said.partition("is not trusted")[2]


def test_a_part_is_better_than_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted_command(monkeypatch, tmp_path, None) == 130
    (path,) = tmp_path.rglob("*.json")
    said = capsys.readouterr().out
    assert f"wrote {path} from what was read by then" in said
    assert "not measured, because of the interrupt: probes of other wording, answers" in said


def test_an_interrupt_while_probes_are_answered_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of minutes of work nothing would be left."""
    few(monkeypatch)
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_method="none"))
    planner = core.planner

    def interrupted(what: str) -> None:
        if "tokens kept" in what:
            raise KeyboardInterrupt

    found = calibrate(core, Effort(lengths=(200,), samples=1, confirms=0, answers=2), interrupted)
    assert found.keeps == ()
    assert "auto_keep" not in found.as_json()
    assert core.planner is planner


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--samples", "0", "samples=0: must be a whole number, at least 1"),
        ("--confirm", "-1", "confirm=-1: must be a whole number, at least 0"),
        ("--answers", "-1", "answers=-1: must be a whole number, at least 0"),
        ("--lengths", "99999", "lengths=99999: the longest prompt here is 32767"),
    ],
)
def test_options_out_of_range_are_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", option, value]) == 2
    assert message in capsys.readouterr().err
