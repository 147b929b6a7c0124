"""Writes the results of an evaluation: a page, JSON, CSV, and pictures if matplotlib is there."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gemserve
from gemserve_lab.run import Outcome

_BINS = 10  # number of depths in a heat map


def write_report(
    out: Path, result: dict[str, Any], outcomes: Sequence[Outcome], comparisons: list[Any]
) -> None:
    """Write `TASK.md`, `TASK.json` (rows and comparisons), `TASK.csv` (rows) and pictures."""
    task, rows = result["task"], result["rows"]
    whole = {**result, "comparisons": comparisons}
    (out / f"{task}.json").write_text(json.dumps(whole, indent=1) + "\n")
    with (out / f"{task}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    pictures: list[str] = []
    if importlib.util.find_spec("matplotlib") is not None:
        pictures = _draw(out, task, rows, outcomes)
    (out / f"{task}.md").write_text(page(whole, pictures), encoding="utf-8")


def _draw(
    out: Path, task: str, rows: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]
) -> list[str]:
    """Draw all pictures; their names."""
    names = [f"{task}.png"]
    draw_scores(out / names[0], rows)
    placed = [o for o in outcomes if o.depth is not None]
    for subtask in dict.fromkeys(o.subtask for o in placed):
        mine = [o for o in placed if o.subtask == subtask]
        names.append(f"{task}_{subtask}_depths.png")
        draw_heat_map(out / names[-1], mine)
    return names


def page(whole: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The results as Markdown, for whoever was not there: tables, differences, what follows."""
    lines = [
        f"# {whole['task']}: {whole['model']}",
        "",
        f"gemserve {gemserve.__version__}, seed {whole['seed']}. *Score* is the share of right "
        "answers, *recall* the share of the needed tokens that were kept, *kept* the mean number "
        "of tokens that the model answered from.",
        "",
        "| subtask | prompt tokens | n | method | kept | score | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in whole["rows"]:
        recall = "" if row["recall"] is None else f"{row['recall']:.2f}"
        lines.append(
            f"| {row['subtask']} | {row['prompt_tokens']:,} | {row['n']} | `{row['method']}` "
            f"| {row['kept_tokens']:,.0f} | {row['score']:.2f} | {recall} |"
        )
    comparisons = whole["comparisons"]
    if comparisons:
        lines += ["", "## Differences", "", "Pair by pair, over all prompts of both methods.", ""]
        lines += ["| | difference | 95% interval | n | |", "|---|---|---|---|---|"]
    for c in comparisons:
        chance = "" if _is_clear(c) else "may be chance"
        lines.append(
            f"| `{c['method']}` − `{c['other']}` | {c['difference']:+.3f} "
            f"| {c['low']:+.3f} to {c['high']:+.3f} | {c['n']} | {chance} |"
        )
    lines += ["", "## What follows", "", *(f"- {advice}" for advice in what_follows(comparisons))]
    lines += ["", *(f"![{name}]({name})" for name in pictures)] if pictures else []
    return "\n".join(lines) + "\n"


# What a clear difference between two methods means: (method, other), if the first one is better,
# if the second one is.
_MEANINGS = {
    ("sieve", "none"): (
        "`sieve` answers better than the whole prompt does: filter these questions.",
        "The whole prompt answers better than `sieve` does: try a larger `keep`, or let `gemserve "
        "calibrate` look for heads; if neither helps, read these prompts whole.",
    ),
    ("sieve:auto", "none"): (
        '`keep: "auto"` answers better than the whole prompt does.',
        'The whole prompt answers better than `keep: "auto"` does.',
    ),
    ("sieve", "sieve:auto"): (
        'A fixed `keep` is better than `"auto"`: `--filter-keep` with that number.',
        '`keep: "auto"` is better than the fixed `keep`: `--filter-keep auto`.',
    ),
    ("sieve", "sieve:attention"): (
        "Words beside attention help.",
        'Attention alone is better: `"lexical": "off"` in requests.',
    ),
    ("sieve", "bm25"): (
        "`sieve` finds what a search for words does not.",
        "A search for words is better than `sieve`: let `gemserve calibrate` look for heads first.",
    ),
}


def what_follows(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each difference that is clear of chance and has a consequence."""
    said = [
        _MEANINGS[pair][0 if c["difference"] > 0 else 1]
        for c in comparisons
        if (pair := (c["method"], c["other"])) in _MEANINGS and _is_clear(c)
    ]
    return said or ["No difference is clear of chance. Ask more questions, or other ones."]


def _is_clear(comparison: Mapping[str, Any]) -> bool:
    """Whether 0 is outside of the interval."""
    return bool(comparison["low"] > 0 or comparison["high"] < 0)


def draw_scores(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw score against length: one panel for each subtask, one line for each method."""
    from matplotlib.figure import Figure

    subtasks = list(dict.fromkeys(row["subtask"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    columns = min(4, len(subtasks))
    lines = -(-len(subtasks) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axis, subtask in zip(axes.flat, subtasks, strict=False):
        lengths = sorted({r["prompt_tokens"] for r in rows if r["subtask"] == subtask})
        for method in methods:
            mine = [r for r in rows if r["subtask"] == subtask and r["method"] == method]
            axis.plot(
                [lengths.index(r["prompt_tokens"]) for r in mine],
                [r["score"] for r in mine],
                marker="o",
                markersize=4,
                label=method,
            )
        axis.set_title(subtask, fontsize=9)
        axis.set_ylim(-0.05, 1.05)
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=8)
    for axis in axes.flat[len(subtasks) :]:
        axis.set_visible(False)
    figure.supylabel("score", fontsize=9)
    figure.supxlabel("prompt tokens", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(methods), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_heat_map(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw score by length and depth of the fact, as in GemFilter's figure 9.4."""
    import numpy as np
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(o.method for o in outcomes))
    lengths = sorted({o.prompt_tokens for o in outcomes})
    figure = Figure(figsize=(2.6 * len(methods) + 0.8, 3.2), layout="constrained")
    axes = figure.subplots(1, len(methods), squeeze=False, sharey=True)[0]
    image: Any = None
    for axis, method in zip(axes, methods, strict=True):
        total = np.zeros((_BINS, len(lengths)))
        count = np.zeros((_BINS, len(lengths)))
        for o in outcomes:
            if o.method == method:
                assert o.depth is not None
                row = min(_BINS - 1, int(o.depth * _BINS))
                column = lengths.index(o.prompt_tokens)
                total[row, column] += o.score
                count[row, column] += 1
        score = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        image = axis.imshow(score, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_title(f"{method}  {total.sum() / count.sum():.2f}", fontsize=9)
        axis.set_xticks(range(len(lengths)), [f"{round(n / 1000)}K" for n in lengths], fontsize=8)
    axes[0].set_yticks([0, _BINS - 1], ["start", "end"], fontsize=8)
    figure.supxlabel("prompt tokens", fontsize=9)
    figure.supylabel("depth of the fact", fontsize=9)
    figure.colorbar(image, ax=list(axes), shrink=0.8)
    figure.savefig(path, dpi=110)
