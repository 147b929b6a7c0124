"""The file of finished runs of `benchmarks/adapters.py --model`, and the table made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from adapter_comparison import CONTESTANTS, find_run, read_runs, table


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
