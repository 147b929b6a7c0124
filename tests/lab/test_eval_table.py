"""What `gemserve eval` prints of its rows."""

from __future__ import annotations

from gemserve_lab.commands.evaluate import outcome_table
from gemserve_lab.run import Row


def row(method: str, subtask: str, prompt_tokens: int = 5712, recall: float | None = None) -> Row:
    return Row(
        method=method,
        subtask=subtask,
        prompt_tokens=prompt_tokens,
        keep=512,
        score=0.25,
        recall=recall,
        kept_tokens=prompt_tokens if method == "none" else 512.4,
        n=200,
    )


def test_what_a_dataset_s_rows_share_is_said_once() -> None:
    """With sixteen datasets every line repeated name, length and count, and a column was empty."""
    methods = ("none", "sieve:fallback")
    rows = [row(method, subtask) for subtask in ("hotpotqa", "lcc") for method in methods]
    assert outcome_table(rows, {}) == [
        "subtask   tokens    n  method          kept  score",
        "hotpotqa    5712  200  none            5712   0.25",
        "                       sieve:fallback   512   0.25",
        "lcc         5712  200  none            5712   0.25",
        "                       sieve:fallback   512   0.25",
    ]


def test_recall_is_shown_where_one_is_known() -> None:
    lines = outcome_table(
        [row("none", "single", 256, recall=1.0), row("snapkv", "single", 256)], {}
    )
    assert lines == [
        "subtask  tokens    n  method  kept  score  recall",
        "single      256  200  none     256   0.25    1.00",
        "                      snapkv   512   0.25",
    ]


def test_another_length_is_another_group() -> None:
    lines = outcome_table([row("none", "single", 256), row("none", "single", 512)], {})
    assert [line.split()[:2] for line in lines[1:]] == [["single", "256"], ["single", "512"]]


def test_rows_that_are_really_those_of_none_are_marked() -> None:
    rows = [row(method, "lcc", 400) for method in ("none", "sieve", "bm25")]
    assert outcome_table(rows, {("lcc", 400, "sieve"): 7, ("lcc", 400, "bm25"): 200}) == [
        "subtask  tokens    n  method  kept  score    whole",
        "lcc         400  200  none     400   0.25",
        "                      sieve    512   0.25    7/200",
        "                      bm25     512   0.25  200/200",
        "whole: examples read as none reads them, for --keep is not below their prompt's length",
    ]
