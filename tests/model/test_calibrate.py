"""Calibration: the layer and heads it picks, what it refuses, and that servers use them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.calibration import Calibration, find_calibration, read_calibration
from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.assemble import assemble, build_core
from gemserve.engine.core import Core
from gemserve.engine.prompt import Prompt
from gemserve.errors import ConfigError
from gemserve.evaluation import calibrate as calibration
from gemserve.evaluation import calibrated, probes
from gemserve.evaluation.calibrate import Effort, calibrate, check_found, choose_bound
from gemserve.evaluation.calibration_result import Found, LayerResult, Trust
from gemserve.evaluation.example import Draw
from gemserve.evaluation.head_search import (
    Observation,
    best_heads,
    recall_of,
    recalls,
    single_recalls,
    watch,
)
from gemserve.evaluation.needle import SUBTASKS
from gemserve.evaluation.observe import observe
from gemserve.evaluation.probes import PROBE_KINDS, draw_probes
from gemserve.evaluation.score import generate
from gemserve.filtering.sieve import Sieve
from gemserve.model.base import hash_weights
from gemserve.model.causal import CausalModel
from gemserve.model.loader import BUILTIN_PATH, Loaded, load
from gemserve.types import Budget, FilterParams, Priority, Span
from tests import models
from tests.model.test_selection import NoText

MEMORY = 64 << 20
TOKENS = 320  # of a hand-made document: 20 and 10 may be kept


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


# By hand: heads that look at one place of a document.


def seen(looks: dict[tuple[int, int], list[int]], gold: list[int]) -> Observation:
    """Two layers of three heads; each of `looks` looks at some places, the others at the first."""
    scores = torch.linspace(0.002, 0.001, TOKENS).repeat(2, 3, 1)
    for layer in range(2):
        for head in range(3):
            scores[layer, head, looks.get((layer, head), [0])] = 0.5
    return Observation(
        kind="k",
        layers=[0, 3],
        scores={False: scores.half(), True: scores.half()},
        document=torch.arange(TOKENS),
        gold=torch.tensor(gold, dtype=torch.long),
    )


def test_recall_is_of_passages_as_sieve_keeps_them() -> None:
    """A token beside the one looked at is found, too: names are looked at by a part of them."""
    probe = seen({(1, 0): [100]}, [100, 105, 200])
    found = recalls(probe.scores[False], probe, 1 / 16)
    assert found.shape == (2, 3)
    assert float(found[1, 0]) == pytest.approx(2 / 3)
    assert float(found[0].amax()) == 0.0
    # a thirty-second are 10 tokens, of a passage of 17
    looks = {(0, 1): [100], (0, 2): [100, 200]}
    both = seen(looks, [100, 200])
    assert recall_of([(0, 2)], both, False) == 1.0
    assert recall_of([(0, 1)], both, False) == 0.5


def test_a_head_that_looks_at_nothing_finds_nothing() -> None:
    """All its scores were zero in half precision: every token tied, and all of them were found."""
    probe = seen({}, [100, 150, 200])
    probe.scores[False].zero_()
    probe.scores[False][1, 1, 50] = 0.9
    assert float(recalls(probe.scores[False], probe, 1 / 16).amax()) < 1.0
    assert recall_of([(3, 1)], probe, False) < 1.0


def test_heads_that_complete_each_other_are_found_together() -> None:
    """The best single heads all looked at the same thing."""
    easy, hard = [100], [200]
    looks = {(0, 0): easy, (0, 1): easy, (1, 2): hard}  # by place of the layer, and head
    asked = [seen(looks, easy), seen(looks, easy), seen(looks, hard)]
    singles = single_recalls(asked, False)
    assert singles.shape == (3, 2, 3)
    lower, recall = best_heads(asked, singles, 0, False)
    assert lower == ((0, 0),)  # one more of the same brings nothing
    assert recall == pytest.approx(2 / 3, abs=0.01)
    heads, recall = best_heads(asked, singles, 3, False)
    assert set(heads) == {(0, 0), (3, 2)}
    assert recall == pytest.approx(1.0)
    assert list(heads) == sorted(heads)


def test_what_is_protected_is_no_document() -> None:
    """Recall counted the question's own tokens, which are kept anyway."""
    core = core_of(CausalModel(models.build("llama")))
    ids = torch.randint(6, models.VOCAB, (300,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(
        ids=ids.tolist(),
        protected=(
            Span(290, 300, Priority.QUESTION),
            Span(1, 20, Priority.SYSTEM),
            Span(100, 132, Priority.HEAD),
        ),
    )
    (evidence,) = observe(core, [prompt], [list(range(285, 300))])
    observed = watch(evidence, "k", [(10, 25), (280, 295)], 5)
    assert observed.document.tolist() == list(range(20, 290))
    at = observed.document[observed.gold].tolist()
    assert at == [*range(20, 25), *range(280, 290)]
    # with the rows behind the question, more is looked at, never less
    assert bool((observed.scores[True] >= observed.scores[False]).all())
    assert bool((observed.scores[True] > observed.scores[False]).any())


@pytest.mark.parametrize(
    ("good", "bad", "bound"),
    [
        ([0.8, 0.9], [0.1, 0.2], 0.8),
        ([0.8, 0.9], [0.95], 0.0),
        ([], [0.3], 0.0),
        ([], [], 0.0),
        ([0.5], [], 0.0),
        ([0.1, *[0.8] * 19], [0.5] * 5, 0.8),  # one false alarm in twenty is allowed,
        ([0.1, *[0.8] * 18], [0.5] * 5, 0.0),  # more is not
    ],
)
def test_the_bound_has_few_false_alarms(good: list[float], bad: list[float], bound: float) -> None:
    chosen = choose_bound(good, bad)
    assert chosen == pytest.approx(bound, abs=1e-4)
    assert sum(g < chosen for g in good) <= 0.05 * len(good)


def layer_of(layer: int, recall: float, own: float | None = None, **more: Any) -> LayerResult:
    heads = more.pop("heads", ((layer, 0),))
    return LayerResult(
        layer=layer,
        heads=heads,
        ends_with=False,
        recall=recall,
        own_recall=recall if own is None else own,
        work=layer / 8,
        **more,
    )


def test_the_earliest_layer_about_as_good_as_the_best_is_a_candidate() -> None:
    rows = [layer_of(0, 0.5), layer_of(1, 0.93), layer_of(2, 0.945), layer_of(3, 0.95)]
    assert [row.layer for row in calibration._candidates(rows, 1000)] == [1, 2, 3]
    rows[1] = layer_of(1, 0.92)
    assert [row.layer for row in calibration._candidates(rows, 1000)] == [2, 3]
    # few probes tell little: one of them more or less does not count
    assert [row.layer for row in calibration._candidates(rows, 20)] == [1, 2, 3]
    # a layer that brings no head of its own is the one below it, and slower
    rows[2] = layer_of(2, 0.945, heads=((1, 0),))
    assert [row.layer for row in calibration._candidates(rows, 1000)] == [3]


def test_few_probes_do_not_excuse_a_layer_that_finds_too_little() -> None:
    """With four probes, layer 0 was taken for as good as one that found far more."""
    rows = [layer_of(0, 0.59), layer_of(1, 0.69), layer_of(2, 0.72)]
    assert [row.layer for row in calibration._candidates(rows, 4)] == [2]
    rows[2] = layer_of(2, 0.72, heads=((0, 0),))
    assert [row.layer for row in calibration._candidates(rows, 4)] == [2]


def test_answers_decide_among_candidates() -> None:
    rows = [layer_of(1, 0.9, score=0.2), layer_of(2, 0.9, score=0.8), layer_of(3, 0.9, score=0.85)]
    assert calibration._earliest(rows, 1000).layer == 3
    assert calibration._earliest(rows, 20).layer == 2
    # a model that answers nothing is judged by what its heads find
    silent = [replace(row, score=0.0) for row in rows]
    untried = [replace(row, score=None) for row in rows]
    for same in (silent, untried):
        assert calibration._earliest(same, 20).layer == 1


def test_probes_that_tell_nothing_write_nothing() -> None:
    """Layer 0 was written where all layers did equally well, or none."""
    check_found([layer_of(0, 0.3), layer_of(1, 0.9)], 8)
    check_found([layer_of(0, 0.7)], 8)
    with pytest.raises(ConfigError, match=r"the best heads find 0\.69 .* less than 0\.7: nothing"):
        check_found([layer_of(0, 0.3), layer_of(1, 0.69)], 8)
    with pytest.raises(ConfigError, match=r"all layers do equally well, 0\.90: nothing"):
        check_found([layer_of(0, 0.9), layer_of(1, 0.9)], 8)
    for layers, count in (([], 0), ([layer_of(0, 0.9), layer_of(1, 0.8)], 0)):
        with pytest.raises(ConfigError, match="no head of this model finds any kind of probe"):
            check_found(layers, count)


# On models.


def core_of(model: CausalModel, **settings: Any) -> Core:
    config = EngineConfig(kv_memory_bytes=MEMORY, filter_min_tokens=0, filter_layer=2, **settings)
    return Core(model, NoText(), config, frozenset())


def test_every_layer_shows_what_the_engine_s_own_filter_pass_sees() -> None:
    """Calibrated is what is served: the heads' choice in one reading is the engine's."""
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_min_tokens=0))
    found, selector = core.calibration, Sieve()
    assert found.is_measured
    draw = Draw(seed=3, num_tokens=700, index=0, samples=1)
    example = SUBTASKS["multikey"](core.tokenizer, draw)
    params = FilterParams(method="sieve", keep=96, return_selection=True)
    prompt = example.prompt
    rows = selector.rows(len(prompt.ids), prompt.question, found.ends_with)
    (evidence,) = observe(core, [prompt], [rows])
    assert list(evidence.layers) == list(range(core.model.num_layers))
    budget = Budget(low=96, high=96, limit=96)
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
    options = ("--lengths", "256", "--samples", "1", "--confirm", "1", "--out", str(out))
    assert main(["calibrate", "--model", str(model), *options, "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
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


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--samples", "0", "samples=0: must be a whole number, at least 1"),
        ("--confirm", "-1", "confirm=-1: must be a whole number, at least 0"),
        ("--lengths", "99999", "lengths=99999: the longest prompt here is 32767"),
    ],
)
def test_options_out_of_range_are_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", option, value]) == 2
    assert message in capsys.readouterr().err


# What a server does where nothing was calibrated.

FOUND = Found(
    layers=(layer_of(1, 0.9),),
    chosen=layer_of(1, 0.9, heads=((0, 2), (1, 3))),
    trust=Trust(bound=0.25, found=0.0, absent=0.5, diffuse=0.5),
    kinds=("number",),
    num_probes=4,
    full_score=None,
    confirmed_recall=0.9,
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

    def find(core: Core, effort: Effort, progress: Any) -> Found:
        efforts.append(effort)
        return FOUND

    monkeypatch.setattr(calibrated, "calibrate", find)
    monkeypatch.chdir(cache.parent)
    before = set(cache.parent.rglob("*"))
    expected = Calibration(
        layer=1, heads=((0, 2), (1, 3)), ends_with=False, coverage_bound=0.25, is_measured=True
    )
    for _ in range(2):
        core = calibrated.build_calibrated_core(uncalibrated, ENGINE)
        assert replace(core.calibration, source=expected.source) == expected
        assert core.config.filter_layer == 1
        assert core.config.filter_keep == 1024
    assert efforts == [calibrated.SHORT]
    said = capsys.readouterr().err
    assert said.count("not calibrated yet") == said.count("kept in") == 1
    assert "warning" not in said
    (written,) = [p for p in set(cache.parent.rglob("*")) - before if p.is_file()]
    assert written.is_relative_to(cache / "gemserve" / "calibrations")
    weights = hash_weights(core.model.hf, rounded=True)
    assert find_calibration(uncalibrated.model, model="other", weights=weights) == written


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
    monkeypatch.setattr(calibrated, "calibrate", None)
    core = calibrated.build_calibrated_core(uncalibrated, engine)
    assert not core.calibration.is_measured
    assert not cache.exists()


def test_without_calibration_the_layer_is_a_guess_and_that_is_said(
    uncalibrated: ModelConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrated, "calibrate", None)
    off = replace(ENGINE, calibrate="off")
    core = calibrated.build_calibrated_core(uncalibrated, off)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "warning: filter layer 3 is not calibrated (guessed from the depth)" in said
    assert core.config.filter_keep == "auto"
    from gemserve.types import FilterOptions

    params = core.planner.resolve(FilterOptions())
    assert (params.keep, params.fallback, params.layer) == ("auto", True, 3)


def test_a_calibration_file_is_used_and_a_wrong_one_refused(
    uncalibrated: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FOUND.as_json()))
    engine = replace(ENGINE, calibrate=str(path))
    core = calibrated.build_calibrated_core(uncalibrated, engine)
    assert core.calibration.heads == FOUND.chosen.heads
    assert core.calibration.source == str(path)
    assert "warning" not in capsys.readouterr().err
    path.write_text(json.dumps(FOUND.as_json() | {"heads": [[0, 99]]}))
    with pytest.raises(ConfigError, match=r"mine\.json: heads=\[\[0, 99\]\] must be"):
        calibrated.build_calibrated_core(uncalibrated, engine)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        calibrated.build_calibrated_core(
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
    short = Effort(lengths=(200,), samples=1, confirms=0)
    monkeypatch.setattr(calibrated, "SHORT", short)
    core = calibrated.build_calibrated_core(uncalibrated, ENGINE)
    said = capsys.readouterr().err
    assert "warning: the calibration failed: the best heads find" in said
    assert "warning: filter layer 3 is not calibrated (guessed from the depth)" in said
    assert core.config.filter_keep == "auto"
    assert not list(cache.rglob("*.json"))


def test_other_weights_under_the_same_name_are_calibrated_anew(tmp_path: Path) -> None:
    """A finetuned copy took over the file that lay beside the original."""
    model = copied(tmp_path / "model")
    loaded = load(ModelConfig(model=str(model)))
    result = calibrated.result_of(loaded, FOUND, calibrated.SHORT, 1.0)
    (model / "calibration.json").write_text(json.dumps(result))
    assert assemble(loaded, ENGINE).calibration.is_measured
    with torch.no_grad():
        next(loaded.model.hf.parameters()).mul_(1.5)
    assert not assemble(loaded, ENGINE).calibration.is_measured


def test_a_random_model_starts_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = Loaded(
        model=CausalModel(models.build("llama")),
        tokenizer=NoText(),
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    core = assemble(loaded, ENGINE)
    assert core.calibration == Calibration(layer=2, source="guessed from the depth")
    assert core.config.filter_keep == "auto"
