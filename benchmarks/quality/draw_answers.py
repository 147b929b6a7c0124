"""Draws how soon a prompt is answered, and how often rightly: the two pictures of the README.

    python benchmarks/quality/answer_cases.py --kinds meaning --samples 1 --length 16384 \\
        --ways … --out times.jsonl
    python benchmarks/quality/answer_cases.py --kinds meaning --shared --length 8000 \\
        --ways … --out answers.jsonl
    python benchmarks/quality/draw_answers.py --times times.jsonl --answers answers.jsonl \\
        --title 'Qwen2.5-Coder-1.5B, two cores' --out docs/pictures

`first_token_by_length.png` has the seconds to the first token of each way at each length of
`--times`. `answers_by_first_token.png` has the right answers of `--answers` over the seconds that
`--times` has for the length nearest to theirs. Both files have lines of `answer_cases.py`; times
are those of a run without `--shared`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks.shared.finished_runs import read_runs

Row = Mapping[str, Any]
STYLES: dict[str, tuple[str, str, str]] = {  # a way's words, colour and mark
    "none": ("everything", "#5f6368", "s"),
    "default": ("the filter", "#1a73e8", "o"),
    "reader": ("the filter, read by the 0.5B", "#188038", "D"),
    "draft": ("the 0.5B's draft (speculative prefill)", "#b06000", "^"),
    "bm25": ("BM25", "#c5221f", "v"),
    "embedding": ("all-MiniLM-L6-v2", "#9334e6", "P"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--title", default="", help="model and processor")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    arguments = parser.parse_args()
    times = _medians(read_runs(arguments.times), "ttft_s")
    draw_times(times, arguments.title, arguments.out / "first_token_by_length.png")
    answers = read_runs(arguments.answers)
    draw_answers(answers, times, arguments.title, arguments.out / "answers_by_first_token.png")


def _medians(rows: Sequence[Row], field: str) -> dict[str, dict[int, float]]:
    """The median of a field of each way at each length, which is in tokens of the prompt."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row.get(field) is not None and row["way"] in STYLES:
            found.setdefault(row["way"], {}).setdefault(row["length"], []).append(row)
    return {way: dict(_median_at(of, field) for of in by.values()) for way, by in found.items()}


def _median_at(rows: Sequence[Row], field: str) -> tuple[int, float]:
    tokens = round(statistics.median(row["prompt_tokens"] for row in rows))
    return tokens, statistics.median(row[field] for row in rows)


def draw_times(times: Mapping[str, Mapping[int, float]], title: str, path: Path) -> None:
    """Seconds over tokens, both by their logarithms. `times`: of each way at each length."""
    figure, axes = _axes(title, "tokens of the prompt", "seconds to the first token")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for way, (words, color, mark) in STYLES.items():
        if way in times:
            points = sorted(times[way].items())
            axes.plot(*zip(*points, strict=True), color=color, marker=mark, label=words)
    lengths = sorted({length for by in times.values() for length in by})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    _save(figure, axes, path)


def draw_answers(
    answers: Sequence[Row], times: Mapping[str, Mapping[int, float]], title: str, path: Path
) -> None:
    """The share of right answers of each way over its seconds to the first token."""
    figure, axes = _axes(title, "seconds to the first token", "share of right answers")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    cases = _answered_by_all(answers)
    for way, (words, color, mark) in STYLES.items():
        rows = [row for row in cases if row["way"] == way]
        if rows and way in times:
            tokens = statistics.median(row["prompt_tokens"] for row in rows)
            seconds = times[way][min(times[way], key=_distance_to(tokens))]
            share = statistics.mean(row["right"] for row in rows)
            axes.scatter([seconds], [share], color=color, marker=mark, s=70, label=words)
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def _answered_by_all(rows: Sequence[Row]) -> list[Row]:
    """The rows of those cases that every way has."""
    ways = {row["way"] for row in rows if row["way"] in STYLES}
    cases = [{row["case"] for row in rows if row["way"] == way} for way in ways]
    common = set.intersection(*cases)
    return [row for row in rows if row["case"] in common]


def _distance_to(tokens: float) -> Callable[[int], float]:
    return lambda length: abs(length - tokens)


def _axes(title: str, across: str, up: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(6.6, 4.2), dpi=110)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(fontsize=8.5)
    figure.savefig(path, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
