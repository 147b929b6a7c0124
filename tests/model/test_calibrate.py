"""Calibration on models: what is read, what is written, and that it is what the engine sees."""

from __future__ import annotations

import json
import re
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
from gemserve.calibration.search.example import ExampleDraw
from gemserve.calibration.search.observe import observe
from gemserve.calibration.search.probes import PROBE_KINDS, draw_probes
from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.engine.build import build_core
from gemserve.errors import ConfigError
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.sieve import Sieve
from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.meaning_facts import facts_in, languages_of, meaning_facts
from gemserve.synthetic.natural_facts import VocabularyName
from gemserve_lab.run import generate
from gemserve_lab.tasks.needle import SUBTASKS
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
    """One document in prose and one of codes, and nothing that is refused for its recall."""
    monkeypatch.setattr(probes, "languages_of", lambda _: ())
    monkeypatch.setattr(calibration, "LEAST_RECALL", least_recall)
    monkeypatch.setattr(calibration, "LEAST_MEANING", 0.0)
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
    options = ("--lengths", "900", "--samples", "1", "--confirm", "1", "--answers", "2")
    asked = ["calibrate", "--model", str(model), *options, "--windows", "0"]
    assert main([*asked, "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    last = json.loads(printed[-1])
    assert json.loads((model / "calibration.json").read_text()) == last
    assert json.loads((out / "calibration.json").read_text()) == last
    assert (out / "calibration.png").stat().st_size > 5000
    found = read_calibration(model / "calibration.json", num_layers=8, num_heads=4)
    assert found.is_measured
    assert last["probes"]["count"] == 10
    assert {"synonym", "multikey"} < set(last["probes"]["kinds"])
    assert set(last["probes"]["recall"]) == set(last["probes"]["kinds"])
    assert [row["layer"] for row in last["layers"]] == list(range(8))
    for costs in ([row["work"] for row in last["layers"]], *_seconds(last["layers"])):
        assert costs == sorted(costs)
    (chosen,) = (row for row in last["layers"] if row["layer"] == last["filter_layer"])
    assert last["recall"] == {"words": chosen["words"], "meaning": chosen["meaning"]}
    best, *others = last["keeps"]
    assert best["keep"] == last["auto_keep"]
    assert {row["keep"] for row in last["keeps"]} == set(choose_keep.KEEPS)
    (told,) = (line for line in printed if line.endswith("← chosen for keep: auto"))
    assert told.startswith(f"{last['auto_keep']:,} tokens kept")
    assert sum("tokens kept" in line for line in printed) == 1 + len(others)
    # a server over the same weights uses it
    core = build_core(ModelConfig(model=str(model)), EngineConfig(kv_memory_bytes=MEMORY))
    assert core.calibration == found
    assert core.calibration.by_meaning
    assert core.config.filter_keep == 1024


def _seconds(layers: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["seconds"][place] for row in layers] for place in range(2)]


def test_probes_are_of_every_kind_and_their_answers_are_in_the_document(tokenizer: Any) -> None:
    drawn = draw_probes(tokenizer, "calibration", [1500], 9, seed=0)
    assert {e.subtask for probe in drawn for e in probe.examples} == set(PROBE_KINDS)
    assert {probe.subject for probe in drawn} > {"prose", "codes", "code", "tables", "German"}
    for probe in drawn:
        for example in probe.examples:
            ids = example.prompt.ids
            kept = [ids[p] for start, stop in example.gold for p in range(start, stop)]
            text = "".join(tokenizer.decode(kept).split())
            assert all("".join(answer.split()) in text for answer in example.answers)
        assert all(prompt.question for prompt in probe.prompts)
        first = probe.prompts[0].ids
        for prompt in probe.prompts[1:]:
            pairs = enumerate(zip(first, prompt.ids, strict=False))
            shared = next(i for i, (a, b) in pairs if a != b)
            assert shared > 0.9 * len(first) - 120  # a document is read once
    tables = draw_probes(tokenizer, "calibration", [1500], 18, seed=0)
    asked = {e.question for p in tables if p.subject in ("code", "tables") for e in p.examples}
    wanted = {f.question for f in meaning_facts("calibration") if f.kind in ("code", "table")}
    assert asked == wanted  # half of them were never asked about
    again = draw_probes(tokenizer, "calibration", [1500], 9, seed=0)
    assert [p.prompts[0].ids for p in again] == [p.prompts[0].ids for p in drawn]


def test_no_fact_stands_in_two_vocabularies() -> None:
    """What was chosen on one is confirmed on the second and measured on the third."""
    names: tuple[VocabularyName, ...] = ("calibration", "confirmation", "evaluation")
    answers = [{fact.answer for fact in meaning_facts(name)} for name in names]
    assert [len(of) for of in answers] == [len(meaning_facts(name)) for name in names]
    assert not answers[0] & answers[1]
    assert not (answers[0] | answers[1]) & answers[2]
    for language in languages_of("calibration"):
        chosen, measured = (facts_in(language, name) for name in ("calibration", "evaluation"))
        assert not {fact.answer for fact in chosen} & {fact.answer for fact in measured}


@pytest.mark.parametrize("vocabulary", ["calibration", "confirmation", "evaluation"])
def test_questions_by_meaning_have_no_word_of_their_fact(vocabulary: VocabularyName) -> None:
    """Words that the fact and the question share are what a search for words finds."""
    for fact in meaning_facts(vocabulary):
        assert fact.answer in fact.gold
        assert fact.gold in fact.fact
        question, decoy = _stems(fact.question), _stems(fact.decoy)
        assert not question & _stems(fact.gold), fact.question
        assert len(question & decoy) >= 2, fact.question
        assert fact.answer.lower() not in (fact.question + fact.decoy).lower()


# words that say nothing of what is asked
_EMPTY = frozenset(
    word[:5]
    for word in re.findall(
        r"\w+",
        """about after again alone also another because been before being between both could does
        doing down each else ever every from given goes have having into itself made make many
        more most much must name only onto other over same some such tell than that their them
        then there these they this those through under until upon very were what when where
        which while whom whose will with without would your function""",
    )
)


def _stems(text: str) -> set[str]:
    words = re.findall(r"[a-z]{4,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return {word[:5] for word in words} - _EMPTY


class Interrupted:
    """Ctrl-C after so many probes."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


LITTLE = Effort(lengths=(900,), samples=1, confirms=0, windows=0, answers=0)


@pytest.mark.slow
def test_an_interrupt_chooses_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    settings = EngineConfig(kv_memory_bytes=MEMORY, filter_method="none")
    core = build_core(ModelConfig(), settings)
    effort = replace(LITTLE, samples=4, confirms=1)
    for count in (1, 4):
        with pytest.raises(KeyboardInterrupt):  # no table has been read
            calibrate(core, effort, Interrupted(count))
    found = calibrate(core, effort, Interrupted(6))
    assert {"synonym", "multikey", "code", "table"} < set(found.kinds)
    assert found.num_probes < 8 * 4 + 2 + 4 + 3
    assert found.confirmed == {}
    assert found.chosen in found.layers
    assert found.segments == found.keeps == ()
    assert found.is_partial
    # these used to be 0, as if nothing were ever mistrusted
    assert (found.trust.found, found.trust.absent, found.trust.diffuse) == (None, None, None)


def test_a_context_without_room_for_a_probe_is_named() -> None:
    """The facts of a probe alone were longer than the context."""
    short = EngineConfig(kv_memory_bytes=MEMORY, filter_method="none", max_prompt_tokens=60)
    core = build_core(ModelConfig(), short)
    with pytest.raises(ConfigError, match="of 60 tokens, is too short for a probe"):
        calibrate(core, replace(LITTLE, lengths=(60,)), lambda *_: None)


def test_an_interrupt_while_the_choice_is_confirmed_keeps_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to end in nothing, although every probe that chooses had been read."""
    few(monkeypatch)
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_method="none"))
    found = calibrate(core, replace(LITTLE, confirms=1), Interrupted(3))
    assert found.is_partial
    assert found.confirmed
    assert found.segments == found.keeps == ()


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
    options = ["--lengths", "900", "--samples", "1", "--kv-memory", "256MiB"]
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
    assert "not measured, because of the interrupt: probes of other wording, windows" in said


def test_an_interrupt_while_probes_are_answered_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of minutes of work nothing would be left."""
    few(monkeypatch)
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=MEMORY, filter_method="none"))
    planner = core.planner

    def interrupted(phase: str, done: int, total: int) -> None:
        if phase == "answers":
            raise KeyboardInterrupt

    found = calibrate(core, replace(LITTLE, answers=2), interrupted)
    assert found.keeps == ()
    assert "auto_keep" not in found.as_json()
    assert core.planner is planner


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--samples", "0", "samples=0: must be a whole number, at least 1"),
        ("--confirm", "-1", "confirm=-1: must be a whole number, at least 0"),
        ("--windows", "-1", "windows=-1: must be a whole number, at least 0"),
        ("--answers", "-1", "answers=-1: must be a whole number, at least 0"),
        ("--lengths", "99999", "lengths=99999: the longest prompt here is 32767"),
    ],
)
def test_options_out_of_range_are_named(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", option, value]) == 2
    assert message in capsys.readouterr().err
