"""`gemserve eval` over files: rows, resuming, and what it refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve_lab import run

FILLER = "The river runs past the houses, they say; nobody counts them. "


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def questions(count: int = 3) -> list[dict[str, Any]]:
    """Facts in 200 to 500 tokens of filler; what is asked last has no words to rank by."""
    lines = []
    for i in range(count):
        half = FILLER * (6 + 3 * i)
        lines.append(
            {
                "context": f"{half}The code for the lantern is 4821{i}. {half}",
                "question": "What is it?" if i == 2 else "What is the code for the lantern?",
                "answers": ["no number", f"4821{i}"],
                "max_tokens": 12,
            }
        )
    return lines


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.slow
def test_questions_of_one_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row a method at the mean length; a second run takes the outcomes that are there."""
    data, out = write(tmp_path / "mine.jsonl", questions()), tmp_path / "out"
    methods = "none,sieve,snapkv,position,bm25"
    arguments = ["eval", "jsonl", "--data", str(data), "--methods", methods, "--keep", "128"]
    arguments += ["--out", str(out), "--json"]
    assert main([*arguments, "--samples", "2"]) == 0
    first = last_line(capsys)
    assert [row["n"] for row in first["rows"]] == [2] * 5
    assert main(arguments) == 0
    result = last_line(capsys)
    assert set(result) == {"task", "model", "seed", "rows"}
    rows = result["rows"]
    assert [row["method"] for row in rows] == methods.split(",")
    assert {tuple(row) for row in rows} == {
        ("method", "subtask", "prompt_tokens", "keep", "score", "recall", "kept_tokens", "n")
    }
    entries = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert len(entries) == 5 * 3  # the first two lines were not run again
    lengths = [e["prompt_tokens"] for e in entries if e["method"] == "none"]
    assert {e["index"] for e in entries} == {1, 2, 3}
    for row in rows:
        assert (row["subtask"], row["keep"], row["recall"], row["n"]) == ("mine", 128, None, 3)
        assert row["prompt_tokens"] == round(sum(lengths) / 3)
        assert 0 <= row["score"] <= 1
    assert rows[0]["kept_tokens"] == pytest.approx(sum(lengths) / 3, abs=0.1)
    assert rows[0]["score"] > rows[3]["score"]  # the ends of a text do not hold its middle
    names = {p.name for p in out.iterdir()}
    assert names == {"outcomes.jsonl", "jsonl.json", "jsonl.csv", "jsonl.md", "jsonl.png"}

    def fail(*_: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("gemserve_lab.run.run_example", fail)
    assert main(arguments) == 0
    assert last_line(capsys) == result
    changed = questions()
    changed[0]["answers"] = ["another"]  # as long as before: only the file's digest tells
    write(data, changed)
    with pytest.raises(AssertionError, match="run again"):
        main(arguments)


@pytest.mark.slow
def test_prompts_no_longer_than_what_is_kept_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever chose, nothing was left out: a score like that of none says nothing of a method."""
    data = write(tmp_path / "mine.jsonl", questions(2))
    methods = ["none", "sieve", "gemfilter", "snapkv", "position", "random", "bm25"]
    arguments = ["eval", "jsonl", "--data", str(data), "--methods", ",".join(methods), "--json"]
    for keep, marks in (("128", None), ("300", "1/2"), ("4000", "2/2")):
        assert main([*arguments, "--keep", keep]) == 0
        lines = capsys.readouterr().out.splitlines()
        marked = [line.split()[-1] == marks for line in lines[1 : 1 + len(methods)]]
        assert marked == [method != "none" and marks is not None for method in methods]
        assert any(line.startswith("whole: ") for line in lines) == (marks is not None)
        assert all("whole" not in row for row in json.loads(lines[-1])["rows"])


def test_longbench_of_three_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"context": FILLER * 8, "input": "Where?", "all_classes": None, "answers": ["houses"]}
    write(tmp_path / "hotpotqa.jsonl", [line, line])
    classes = ["Location", "Other"]
    write(tmp_path / "trec.jsonl", [line | {"all_classes": classes, "answers": classes[:1]}])
    write(tmp_path / "lcc.jsonl", [line | {"input": "", "answers": ["x = 1"]}])
    write(tmp_path / "vcsum.jsonl", [line])
    arguments = ["eval", "longbench", "--data", str(tmp_path), "--methods", "none,bm25", "--json"]
    assert main([*arguments, "--keep", "64"]) == 0
    rows = last_line(capsys)["rows"]
    assert [(row["subtask"], row["n"]) for row in rows[::2]] == [
        ("hotpotqa", 2),
        ("trec", 1),
        ("lcc", 1),
    ]
    assert main([*arguments, "--keep", "64", "--subtasks", "lcc"]) == 0
    assert last_line(capsys)["rows"] == rows[4:]


def test_prompts_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"context": FILLER, "question": "?", "answers": ["a"], "max_tokens": 32_760}
    data = write(tmp_path / "a.jsonl", [*questions(1), long])
    arguments = ["eval", "jsonl", "--data", str(data), "--methods", "position", "--json"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "1 of 2 prompts are too long for this model or its KV memory: " in error
    assert "a.jsonl, line 2 has " in error
    assert " tokens; 8 leave room for an answer of 32760; --skip-too-long runs" in error
    assert main([*arguments, "--skip-too-long"]) == 0
    shown = capsys.readouterr()
    assert "left out: 1 of 2 prompts" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["rows"][0]["n"] == 1
    write(data, [long])
    assert main([*arguments, "--skip-too-long"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jsonl"], "data: jsonl needs --data, the path of its examples"),
        (["jsonl", "--data", "x", "--lengths", "500"], "lengths=500: the prompts of jsonl have"),
        (["longbench", "--data", "x", "--methods", "oracle"], "methods=oracle: longbench does not"),
        (
            ["jsonl", "--data", "x", "--samples", "0"],
            "samples=0: must be a whole number, at least 1",
        ),
        (["jsonl", "--data", "no.jsonl"], "data=no.jsonl: No such file or directory"),
        (["longbench", "--data", "no"], "data=no: No such file or directory"),
        (["longbench", "--data", __file__], "subtasks=test_evaluation_files: no dataset of"),
        (["needle", "--data", "x"], "data=x: needle makes its examples itself"),
        (["needle", "--skip-too-long"], "skip-too-long: needle makes its examples itself"),
    ],
)
def test_options_of_the_other_kind_of_task(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_answered_before_a_signal_is_kept(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """Hours of answers used to be gone, and without a terminal nothing showed how far it was."""
    data, out = write(tmp_path / "mine.jsonl", questions(4)), tmp_path / "out"
    arguments = ["eval", "jsonl", "--data", str(data), "--methods", "none,sieve", "--keep", "128"]
    answer, answered = run.run_example, 0

    def answer_two(*given: Any) -> Any:
        nonlocal answered
        answered += 1
        if answered == 3:
            signal.raise_signal(number)
        return answer(*given)

    monkeypatch.setattr("gemserve_lab.run.run_example", answer_two)
    monkeypatch.setattr("gemserve_lab.commands.evaluate._EVERY_S", 0.0)
    handler = signal.getsignal(number)
    assert main([*arguments, "--json"]) == 128 + number
    assert signal.getsignal(number) is handler
    printed = capsys.readouterr()
    assert [row["n"] for row in json.loads(printed.out.splitlines()[-1])["rows"]] == [2, 2]
    assert "ended early: these are 4 of 8 answers; with --out FOLDER" in printed.err
    assert "evaluating: 4 of 8 answers, about " in printed.err
    answered = 0
    assert main([*arguments, "--out", str(out), "--json"]) == 128 + number
    assert "goes on from there" in capsys.readouterr().err
    answered = 3  # two of the four are left
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    assert answered == 5
    assert [row["n"] for row in last_line(capsys)["rows"]] == [4, 4]
