"""The evaluation: right answers stand where it says, and nothing is counted that was not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import AUTO_MIN_KEEP
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.filtering.protected_budget import always_read, count_always_read
from gemserve.filtering.sieve import Sieve
from gemserve.synthetic.problems import Problem, ProblemMaker
from gemserve_lab.compare import compare, judge_fallback
from gemserve_lab.methods_compared import CHOSEN_OUTSIDE
from gemserve_lab.run import Outcome, Outcomes, average, evaluate, run_example
from gemserve_lab.tasks.registry import TASKS

ALL = [(task, name) for task, subtasks in TASKS.items() for name in subtasks]


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core(ModelConfig(device="cpu"), EngineConfig(filter_min_tokens=0))


def problems(rng: Random) -> list[Problem]:
    maker = ProblemMaker(rng, two_words=0.3, letters=0.3)
    return [
        maker.single(),
        maker.multi_value(4),
        maker.multi_query(3),
        maker.tracking(4, chains=2),
        maker.common_words(300, count=3, common_share=0.5, decay=0.7),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_answers_stand_where_problems_say(seed: int) -> None:
    for problem in problems(Random(seed)):
        for answer in problem.answers:
            if answer.start >= 0:
                assert problem.statements[answer.statement].startswith(answer.text, answer.start)
                assert answer.statement in problem.gold
        assert len({a.text for a in problem.answers}) == len(problem.answers)


@pytest.mark.parametrize("seed", range(10))
def test_assignments_lead_from_the_value_to_every_answer(seed: int) -> None:
    problem = ProblemMaker(Random(seed)).tracking(4, chains=3)
    values: dict[str, str] = {}
    for statement in problem.statements:
        name, source = statement.removeprefix("VAR ").removesuffix(".").split(" = ")
        values[name] = values[source.removeprefix("VAR ")] if "VAR" in source else source
    asked = next(v for v in values.values() if v in problem.question)
    assert [a.text for a in problem.answers] == [n for n, v in values.items() if v == asked]


@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_the_commonest_words_are_the_answer(decay: float) -> None:
    for seed in range(10):
        problem = ProblemMaker(Random(seed)).common_words(
            400, count=3, common_share=0.5, decay=decay
        )
        words = problem.statements[0].split()
        ranked = sorted(set(words), key=lambda w: -words.count(w))
        assert ranked[:3] == [a.text for a in problem.answers]
        assert words.count(ranked[3]) < words.count(ranked[2])


@pytest.mark.parametrize(("task", "name"), ALL)
def test_examples_hold_their_answers_within_their_length(core: Core, task: str, name: str) -> None:
    maker = TASKS[task][name]
    for index in range(3):
        draw = ExampleDraw(seed=1, num_tokens=700, index=index, samples=3)
        example = maker(core.tokenizer, draw)
        assert 300 < len(example.prompt.ids) <= 700
        gold = " ".join(core.tokenizer.decode(example.prompt.ids[a:b]) for a, b in example.gold)
        text = core.tokenizer.decode(example.prompt.ids)
        for answer in example.answers:
            assert answer in text
            assert not example.gold or answer in gold


def test_a_draw_is_its_seed(core: Core) -> None:
    for task, name in ALL:
        first, again = (
            TASKS[task][name](
                core.tokenizer, ExampleDraw(seed=2, num_tokens=600, index=1, samples=4)
            )
            for _ in range(2)
        )
        other = TASKS[task][name](
            core.tokenizer, ExampleDraw(seed=3, num_tokens=600, index=1, samples=4)
        )
        assert first.prompt.ids == again.prompt.ids
        assert first.prompt.ids != other.prompt.ids


def example_of(core: Core, name: str, num_tokens: int = 900) -> Example:
    draw = ExampleDraw(seed=0, num_tokens=num_tokens, index=1, samples=3)
    return TASKS["ruler"][name](core.tokenizer, draw)


def test_reading_once_for_two_methods_is_reading_twice(core: Core) -> None:
    for name in ("niah_single", "niah_multikey", "vt"):
        example = example_of(core, name)
        together = run_example(core, example, 3, ["none", "snapkv"], 200)
        alone = [run_example(core, example, 3, [method], 200)[0] for method in ("none", "snapkv")]
        assert [o.text.strip() for o in together] == [o.text.strip() for o in alone]
        assert [o.kept_tokens for o in together] == [o.kept_tokens for o in alone]


@pytest.mark.parametrize("arm", CHOSEN_OUTSIDE)
def test_arms_outside_keep_their_budget(core: Core, arm: str) -> None:
    example = example_of(core, "niah_multikey")
    protected = example.prompt.protected
    always = always_read(protected, len(example.prompt.ids))
    for keep in (80, 128, 400):
        kept = CHOSEN_OUTSIDE[arm](core.tokenizer, example, keep)
        assert set(always) <= set(kept)
        assert len(kept) == len(set(kept)) <= keep + len(always)
        assert arm == "oracle" or len(kept) == keep + len(always)
        assert list(kept) == sorted(kept)
        if keep == 400:
            gold = {p for a, b in example.gold for p in range(a, b)}
            assert gold <= set(kept)


def test_a_stopped_run_resumes(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subtasks = {"single": TASKS["needle"]["single"]}
    draws = [ExampleDraw(seed=0, num_tokens=400, index=i, samples=3) for i in range(3)]
    path, run = tmp_path / "outcomes.jsonl", {"model": "builtin", "seed": 0}
    methods = ["none", "sieve"]

    def go(draws: list[ExampleDraw], run: dict[str, Any]) -> list[Outcome]:
        return list(evaluate(core, subtasks, draws, methods, 128, Outcomes(path, run)))

    first = go(draws[:2], run)
    assert len(path.read_text().splitlines()) == 4
    whole = go(draws, run)
    assert whole[:4] == first
    assert len(path.read_text().splitlines()) == 6

    def fail(*_: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("gemserve_lab.run.run_example", fail)
    assert go(draws, run) == whole
    with pytest.raises(AssertionError, match="run again"):
        go(draws, {**run, "seed": 1})


def outcome(method: str, index: int, score: float, subtask: str = "a") -> Outcome:
    return Outcome(
        subtask=subtask,
        prompt_tokens=100,
        samples=9,
        index=index,
        method=method,
        keep=16,
        score=score,
        recall=None,
        kept_tokens=16,
        depth=None,
        text="",
    )


def test_comparisons_are_paired() -> None:
    """Only examples that both methods answered count, and the worst cell is named."""
    outcomes = [outcome("none", i, 1.0) for i in range(4)]
    outcomes += [outcome("sieve", i, float(i > 0)) for i in range(4)]
    outcomes += [outcome("none", i, 0.0, "b") for i in range(4)]
    outcomes += [outcome("sieve", i, 1.0, "b") for i in range(2)]
    result = compare(outcomes, "sieve", "none")
    assert result.n == 6
    assert result.difference == pytest.approx((2 - 1) / 6)
    assert result.worst == pytest.approx(-0.25)
    assert result.worst_cell == ("a", 100)
    assert result.low < result.difference < result.high
    with pytest.raises(ValueError, match="no example"):
        compare(outcomes, "sieve", "random")


def test_the_fallback_is_judged_by_what_sieve_does_without_it() -> None:
    """Fired where none is right and sieve wrong, or where sieve is right; the rest says nothing."""
    outcomes: list[Outcome] = []
    cases = [
        (1.0, 0.0, True),
        (1.0, 0.0, False),
        (1.0, 1.0, True),
        (0.0, 1.0, False),
        (0.0, 0.0, True),
    ]
    for index, (none, sieve, fires) in enumerate(cases):
        outcomes += [outcome("none", index, none), outcome("sieve", index, sieve)]
        adaptive = outcome("sieve:fallback", index, 1.0)
        outcomes.append(replace(adaptive, reason="diffuse_attention" if fires else None))
    outcomes += [outcome("none", 9, 1.0), outcome("sieve", 9, 0.0)]
    verdict = judge_fallback(outcomes, "sieve")
    assert (verdict.needed, verdict.needed_fired) == (2, 1)
    assert (verdict.idle, verdict.idle_fired) == (2, 1)


def test_adaptive_arms_tell_what_they_saw(core: Core) -> None:
    draw = ExampleDraw(seed=5, num_tokens=400, index=0, samples=1)
    example = TASKS["needle"]["single"](core.tokenizer, draw)
    arms = ["sieve", "sieve:auto", "sieve:fallback"]
    fixed, auto, fallback = run_example(core, example, 1, arms, 100)
    always = count_always_read(example.prompt.protected, len(example.prompt.ids))
    assert always > 0
    assert 100 - Sieve().passage_limit(100) < fixed.kept_tokens - always <= 100
    assert fixed.coverage is not None
    assert fixed.reason is None
    if auto.reason is None:
        least = AUTO_MIN_KEEP - Sieve().passage_limit(AUTO_MIN_KEEP)
        assert least < auto.kept_tokens - always <= AUTO_MIN_KEEP
    assert fallback.coverage == fixed.coverage
    whole = len(example.prompt.ids)
    assert fallback.kept_tokens == (fixed.kept_tokens if fallback.reason is None else whole)


def test_rows_average_what_was_run() -> None:
    rows = average([outcome("sieve", i, float(i % 2)) for i in range(4)])
    assert [(r.score, r.recall, r.n) for r in rows] == [(0.5, None, 4)]


def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = "none,sieve,snapkv,position,random,oracle,bm25"
    arguments = ["eval", "needle", "--methods", methods, "--lengths", "256,400", "--samples"]
    status = main([*arguments, "2,1", "--keep", "0.5", "--out", str(tmp_path), "--json"])
    assert status == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"task", "model", "seed", "rows"}
    assert [row["n"] for row in result["rows"]] == [2] * 7 + [1] * 7
    assert {p.name for p in tmp_path.iterdir()} == {
        "outcomes.jsonl",
        "needle.json",
        "needle.csv",
        "needle.md",
        "needle.png",
        "needle_single_depths.png",
    }


def test_segments_are_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outcomes with segments must not pass for those of one sequence, nor the other way round."""
    arguments = ["eval", "needle", "--methods", "sieve", "--lengths", "1200", "--samples", "1"]
    for window in ("256", "off", "256", "auto"):
        assert main([*arguments, "--window", window, "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"].get("window") for line in lines] == [256, None, 1536]
    longer = ["eval", "needle", "--lengths", "32768", "--samples", "1", "--window", "512"]
    assert main([*longer, "--methods", "none,sieve"]) == 2
    assert "lengths=32768: the longest prompt of this model is 32767" in capsys.readouterr().err
    assert main([*arguments, "--window", "most"]) == 2
    assert "window=most: must be a count of tokens from 256" in capsys.readouterr().err
    assert main([*arguments, "--window", "99999"]) == 2
    assert "filter_window=99999: must be from 256 to 32512" in capsys.readouterr().err


def test_another_calibration_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a new calibration of the same layer the outcomes of the former one were shown."""
    changes: dict[str, Any] = {}

    def build(*arguments: Any) -> Core:
        made = build_calibrated_core(*arguments)
        made.calibration = replace(made.calibration, **changes)
        return made

    monkeypatch.setattr("gemserve.calibration.search.calibrated_core.build_calibrated_core", build)
    arguments = ["eval", "needle", "--methods", "sieve", "--lengths", "256", "--samples", "1"]
    written = []
    for changed in ({"heads": ((2, 0),)}, {"heads": ((2, 3),)}, {"heads": ((2, 0),)}):
        changes = changed
        assert main([*arguments, "--keep", "64", "--out", str(tmp_path)]) == 0
        written.append(len((tmp_path / "outcomes.jsonl").read_text().splitlines()))
    assert written == [1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--subtasks", "nope"], "subtasks=nope: must be among single, multikey"),
        (["--methods", "none,nope"], "methods=nope: must be among none"),
        (
            ["--keep", "auto"],
            "keep=auto: methods are compared at one budget; see method sieve:auto",
        ),
        (["--samples", "1,2,3"], "samples=1,2,3: 3 numbers for 2 lengths"),
        (["--samples", "0"], "samples=0: must be at least 1"),
        (["--lengths", "99999"], "lengths=99999: the longest prompt of this model is 32767"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "needle", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_outcomes_are_resumed_under_their_metric_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with another metric would show the scores of the first."""
    arguments = ["eval", "needle", "--methods", "none", "--lengths", "256", "--samples", "1"]
    for metric in ([], ["--metric", "contains"], ["--metric", "exact"]):
        assert main([*arguments, *metric, "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"]["metric"] for line in lines] == ["contains", "items"]
    assert main(["eval", "jsonl", "--data", "x", "--metric", "exact"]) == 2
    assert "metric=exact: jsonl has a metric of its own" in capsys.readouterr().err
