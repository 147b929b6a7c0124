"""`benchmarks/adapters/pictures.py`: tables and pictures of a file of made-up runs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.adapters import pictures
from benchmarks.adapters.pictures import Standing, chosen, markdown, read_standings

RATES = {"lora": 0.003, "ntk": 0.01, "prefix": 0.05, "activation": 0.01}
QUESTIONS = 40
TRIED: tuple[tuple[str, int, float], ...] = (
    ("zero-shot", 0, 0.1),
    ("few-shot 8", 0, 0.4),
    ("lora 1", 115_200, 0.7),
    ("lora 5", 576_000, 0.8),
    ("ntk 4", 155_520, 0.4),
    ("ntk 16", 570_240, 0.7),
    ("ntk 16 r=2d", 864_000, 0.6),
    ("prefix 10", 115_200, 0.5),
    *((f"activation {layer}", 576, 0.2) for layer in (1, 8, 15, 22)),
)


def run_of(name: str, seed: int, share: float = 0.5, **changes: Any) -> dict[str, Any]:
    rng = Random(f"{name} {seed}")
    kind = name.split()[0]
    rate = RATES.get(kind)
    scores = [float(rng.random() < share) for _ in range(QUESTIONS)]
    steps = range(10, 110, 10)
    history = [{"step": float(s), "loss": 3.0 / s + rng.random() / 9} for s in steps]
    history += [{"step": float(s), "eval_loss": 4.0 / s + 0.2} for s in (50, 100)]
    history.append({"step": 100.0, "loss": float("nan")})
    plain = {"model": "smollm2", "task": "notes", "examples": 1000, "minutes": 20.0}
    numbers = {"loss": 0.4, "ttft_ms": 30.0, "decode_ms": None, "mixed_ms": 9.0}
    return {
        **plain,
        **numbers,
        **{"contestant": name, "seed": seed, "rate": rate, "parameters": 100},
        "score": sum(scores) / QUESTIONS,
        "scores": {"exact": scores, "pattern": [1.0] * QUESTIONS},
        "eval_loss": 0.3 + seed / 100 if rate else None,
        "train_s": 100.0 if rate else None,
        "history": history if rate else [],
        **changes,
    }


def write(path: Path, runs: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(run) for run in runs) + '\n{"cut off": ')
    return path


def test_each_task_has_a_table_and_two_small_pictures(tmp_path: Path, capsys: Any) -> None:
    """A run without losses, a loss that is no number or equal parameters stopped the drawing."""
    tried = [(*one, seed) for one in TRIED for seed in (1, 2, 3)]
    runs = [run_of(name, seed, share, parameters=size) for name, size, share, seed in tried]
    runs += [
        {**run, "task": "records", "history": []}  # an older file has no losses
        for run in runs[:12]
    ]
    out, told = tmp_path / "pictures", tmp_path / "tables.md"
    path = write(tmp_path / "runs.jsonl", runs)
    pictures.main([str(path), "--out", str(out), "--markdown", str(told)])
    drawn = sorted(file.name for file in out.iterdir())
    assert drawn == ["adapters_notes.png", "adapters_notes_loss.png", "adapters_records.png"]
    for file in out.iterdir():
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size < 100_000
    text = told.read_text()
    assert text in capsys.readouterr().out
    assert text.count("### ") == 2
    notes, records = text.split("### ")[1:]
    assert "(pictures/adapters_notes_loss.png)" in notes
    assert "loss.png" not in records
    rows = [line.split(" | ") for line in notes.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(TRIED)
    assert "TTFT, ms" in rows[0]
    assert "decode step, ms" not in rows[0]  # nothing is known
    lora = next(row for row in rows if row[0] == "| lora 5")
    assert lora[1] == "576,000"
    assert lora[rows[0].index("difference to few-shot (95%)")].startswith("**+0.")


def test_differences_are_paired_by_question() -> None:
    """Means over seeds come first: each question counts once, whatever its seeds."""
    few = [run_of("few-shot 8", 1, scores={"exact": [1.0, 0.0, 0.0, 0.0]})]
    ours = [
        run_of("lora 5", 1, scores={"exact": [1.0, 1.0, 0.0, 0.0]}),
        run_of("lora 5", 2, scores={"exact": [1.0, 1.0, 1.0, 0.0]}),
    ]
    standing, other = Standing(tuple(ours)), Standing(tuple(few))
    assert standing.by_question("exact") == [1.0, 1.0, 0.5, 0.0]
    assert standing.spread == (0.5, 0.75)
    mean, low, high = standing.score
    assert low < mean == 0.625 < high
    gap = standing.difference(other)
    assert gap is not None
    # the gaps are 0, 1, 0.5 and 0; their standard deviation is 0.479
    assert gap == pytest.approx((0.375, 0.375 - 0.4693, 0.375 + 0.4693), abs=1e-3)
    fewer = Standing((run_of("few-shot 8", 1, scores={"exact": [1.0]}),))
    assert standing.difference(fewer) is None
    assert "+0.375 (-0.094 to +0.844)" in markdown([standing, other])


def test_the_rate_is_not_chosen_by_the_test_score(tmp_path: Path) -> None:
    """Otherwise the best of several rates looks better than it is."""
    runs = [
        run_of("lora 5", 1, rate=0.1, share=1.0, eval_loss=0.9),
        run_of("lora 5", 1, rate=0.01, share=0.0, eval_loss=0.1),
        run_of("lora 5", 1, rate=0.01, share=0.0, eval_loss=0.2),  # repeated: the last one counts
        run_of("prefix 1", 1, rate=0.1, eval_loss=0.1),
        run_of("prefix 1", 1, rate=0.2, eval_loss=0.2),
        run_of("prefix 1", 2, rate=0.2, eval_loss=0.2),
    ]
    standings = read_standings([write(tmp_path / "runs.jsonl", runs)])["smollm2", "notes"]
    assert len(standings) == 4
    lora, prefix = chosen(standings)
    assert [(run["rate"], run["eval_loss"]) for run in lora.runs] == [(0.01, 0.2)]
    assert [run["rate"] for run in prefix.runs] == [0.2, 0.2]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        pictures.main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path)])
    assert "none.jsonl: no such file of runs" in capsys.readouterr().err
