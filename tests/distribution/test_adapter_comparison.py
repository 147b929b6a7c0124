"""The file of finished runs that adapters are compared by, and the table made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapters import comparison
from benchmarks.adapters.comparison import CONTESTANTS, table
from benchmarks.shared.finished_runs import find_run, read_runs


def run_of(contestant: str, seed: int, **changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(
        ("loss", "parameters", "train_s", "ttft_ms", "decode_ms", "mixed_ms"), 2.0
    )
    rate = None if contestant == "zero-shot" else 0.01
    return {
        "contestant": contestant,
        "seed": seed,
        "rate": rate,
        "score": 0.5,
        **numbers,
        **changes,
    }


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    """A run that was stopped while it wrote made every later start fail."""
    path = tmp_path / "runs.jsonl"
    assert read_runs(path) == []
    whole = run_of("ntk 16", 1)
    path.write_text(json.dumps(whole) + "\n" + json.dumps(run_of("ntk 16", 2))[:-5])
    assert read_runs(path) == [whole]
    assert find_run(read_runs(path), {"contestant": "ntk 16", "seed": 1, "rate": 0.01}) == whole
    for other in ({"seed": 2}, {"rate": 0.02}, {"contestant": "ntk 4"}):
        key = {"contestant": "ntk 16", "seed": 1, "rate": 0.01, **other}
        assert find_run(read_runs(path), key) is None


def test_an_answer_may_contain_a_line_separator(tmp_path: Path) -> None:
    """A run with such an answer counted as cut off, and was done again at every start."""
    path = tmp_path / "runs.jsonl"
    whole = run_of("ntk 16", 1, answers=["one\u2028two"])
    path.write_text(json.dumps(whole, ensure_ascii=False) + "\n")
    assert read_runs(path) == [whole]


def write_small_task(task: str, folder: Path, seed: int, sizes: dict[str, int]) -> dict[str, int]:
    """Like `write_task`, which reads the whole standard library."""
    for name, count in sizes.items():
        asked = [{"role": "user", "content": f"Write {i}."} for i in range(count)]
        lines = [[question, {"role": "assistant", "content": "one"}] for question in asked]
        text = "\n".join(json.dumps({"messages": line}) for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return sizes


def test_a_run_keeps_its_losses_and_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A contestant that this model cannot have ended the whole comparison."""
    out, kept = tmp_path / "runs.jsonl", tmp_path / "kept"
    left_over = kept / "notes-activation-1-1-0.01"
    left_over.mkdir(parents=True)
    (left_over / "adapter.json").write_text("{}")
    options = "--model builtin --task notes --examples 8 --tests 2 --no-timing --seeds 1"
    given = [*options.split(), "--only", "activation", "--rates", "0.01"]
    given += ["--out", str(out), "--adapters", str(kept)]
    monkeypatch.setattr(comparison, "write_task", write_small_task)
    monkeypatch.setattr(sys, "argv", ["comparison.py", *given])
    comparison.main()
    (run,) = read_runs(out)
    assert run["contestant"] == "activation 1"
    assert (run["epochs"], run["batch_size"], run["tests"]) == (1.0, 8, 2)
    assert [set(entry) for entry in run["history"]] == [{"step", "loss"}, {"step", "eval_loss"}]
    assert "left out: activation 22, seed 1: layer=22" in capsys.readouterr().out
    assert [folder.name for folder in kept.iterdir()] == [left_over.name]
    assert (left_over / "adapter.safetensors").exists()


def test_the_table_has_means_over_seeds() -> None:
    runs = [
        run_of("ntk 16", 1, score=0.4),
        run_of("ntk 16", 2, score=0.8),
        run_of("ntk 16", 3, rate=0.1, score=0.0),
        run_of("zero-shot", 1, train_s=None),
    ]
    first, other, plain = table(runs)
    assert first["score"] == pytest.approx(0.6)
    assert (first["seeds"], first["least"], first["most"]) == (2, 0.4, 0.8)
    assert (other["rate"], other["seeds"]) == (0.1, 1)
    assert plain["train_s"] is None


def test_names_are_unique() -> None:
    """Runs are told apart by them."""
    names = [contestant.name for contestant in CONTESTANTS]
    assert len(set(names)) == len(names)
