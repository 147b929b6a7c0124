"""Tables and pictures of the adapter comparison, from the runs of `adapters.py --model --out FILE`.

For each task: a Markdown table, a picture of the scores against the number of parameters, and one
of the losses in training.

    python benchmarks/adapters/adapter_pictures.py runs.jsonl \
        --out docs/pictures --markdown tables.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.adapters.adapter_standings import (
    FEW_SHOT,
    ZERO_SHOT,
    Run,
    Standing,
    chosen,
    find_kind,
    markdown,
    read_standings,
)
from gemserve_client.load_test.pictures import LIGHT, Draw, Theme, png

COLORS = {"lora": "#1f6feb", "ntk": "#d4650a", "prefix": "#2da44e", "activation": "#8250df"}
LINES = {ZERO_SHOT: ("#57606a", ":"), FEW_SHOT: ("#57606a", "--")}
_ALIKE = 1.15  # largest ratio of numbers of parameters that would be one place
_APART = 1.25  # ratio of the places of such points
_LOG_ABOVE = 20  # ratio of the largest to the smallest loss


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="files of finished runs")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    arguments = parser.parse_args(given)
    try:
        tasks = read_standings(arguments.runs)
    except FileNotFoundError as error:
        parser.error(f"{error}: no such file of runs")
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(
        _section(model, task, standings, arguments.out, _slug(model, task, tasks))
        for (model, task), standings in tasks.items()
    )
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")


def _slug(model: str, task: str, tasks: Any) -> str:
    """The part of a file's name that tells task and model, if there are several ones."""
    is_alone = len({other for other, _ in tasks}) == 1
    return f"adapters_{task}" if is_alone else f"adapters_{Path(model).name}_{task}"


def _section(model: str, task: str, standings: Sequence[Standing], folder: Path, slug: str) -> str:
    """Draw a task's pictures into `folder`. Returns its table, and what was drawn."""
    lines = [f"### {task}, {model}\n", markdown(standings)]
    shown = chosen(standings)
    drawings = [("Score against parameters", f"{slug}.png", scores(f"{task}, {model}", shown))]
    curves = best_of_kinds(shown)
    if curves:
        title = f"{task}, {model}: the best seed of each type"
        drawings.append(("Losses in training", f"{slug}_loss.png", losses(title, curves)))
    for told, name, draw in drawings:
        (folder / name).write_bytes(png(draw, LIGHT))
        lines.append(f"![{told}: {task}](pictures/{name})\n")
    return "\n".join(lines)


def scores(title: str, standings: Sequence[Standing]) -> Draw:
    """Score against parameters, with its interval. Prompts without an adapter are lines.

    Points of nearly the same number of parameters are drawn side by side.
    """

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        trained = [standing for standing in standings if standing.kind in COLORS]
        axes.set_xscale("log")
        if trained:
            sizes = [standing.parameters for standing in trained]
            axes.set_xlim(min(sizes) / 2, max(sizes) * 3)  # room for the names
        places, named = _places(trained), set[str]()
        for standing in trained:
            label = "_" if standing.kind in named else standing.kind
            named.add(standing.kind)
            _point(axes, standing, places[standing.name], label)
        for kind, (color, style) in LINES.items():
            found = find_kind(standings, kind)
            if found is not None:
                mean, low, high = found.score
                axes.axhline(mean, color=color, linestyle=style, label=found.name)
                axes.axhspan(low, high, color=color, alpha=0.08, linewidth=0)
        sizes_told = "beside the points: rank of lora, s of ntk, positions of a prefix, or layer"
        axes.set(
            xlabel=f"parameters ({sizes_told})",
            ylabel=f"score ({standings[0].rules[0]})",
            title=title,
        )
        axes.set_ylim(-0.03, 1.03)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=6, fontsize=8)
        return figure

    return draw


def _places(standings: Sequence[Standing]) -> dict[str, float]:
    """Where each point stands: at its number of parameters, but apart from those beside it."""
    places: dict[str, float] = {}
    ordered = sorted(standings, key=lambda standing: standing.parameters)
    while ordered:
        limit = ordered[0].parameters * _ALIKE
        alike = [standing for standing in ordered if standing.parameters <= limit]
        for index, standing in enumerate(alike):
            shift = index - (len(alike) - 1) / 2
            places[standing.name] = alike[0].parameters * _APART**shift
        ordered = ordered[len(alike) :]
    return places


def _point(axes: Axes, standing: Standing, place: float, label: str) -> None:
    """A point with its interval, and what tells it from others of its type."""
    color = COLORS[standing.kind]
    mean, low, high = standing.score
    axes.errorbar(
        place,
        mean,
        [[max(0.0, mean - low)], [max(0.0, high - mean)]],
        fmt="o",
        markersize=5,
        capsize=2,
        linewidth=1,
        color=color,
        label=label,
    )
    axes.annotate(
        standing.name.removeprefix(standing.kind).strip(),
        (place, mean),
        xytext=(4, 3),
        textcoords="offset points",
        color=color,
        fontsize=8,
    )


def best_of_kinds(standings: Sequence[Standing]) -> list[Run]:
    """Of each type the run with the lowest validation loss, among those that tell their losses."""
    best = []
    for kind in COLORS:
        runs = [run for s in standings if s.kind == kind for run in s.runs if run.get("history")]
        if runs:
            best.append(min(runs, key=lambda run: _finite(run.get("eval_loss"))))
    return best


def _finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def losses(title: str, runs: Sequence[Run]) -> Draw:
    """Training losses as thin lines, and evaluation losses as thick lines with points, by step."""

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(7.5, 3.8), layout="constrained")
        axes = figure.subplots()
        seen: list[float] = []
        for run in runs:
            name = run["contestant"]
            color = COLORS[name.split()[0]]
            for loss, look in (
                ("loss", {"linewidth": 0.8, "alpha": 0.5}),
                ("eval_loss", {"linewidth": 2, "marker": "o", "markersize": 4, "label": name}),
            ):
                points = [(e["step"], e[loss]) for e in run["history"] if loss in e]
                points = [(step, value) for step, value in points if math.isfinite(value)]
                seen += [value for _, value in points]
                axes.plot(*zip(*points, strict=True) if points else ([], []), color=color, **look)
        if seen and min(seen) > 0 and max(seen) > _LOG_ABOVE * min(seen):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel="loss per token of an answer", title=title)
        axes.text(
            0.99,
            0.97,
            "thick: validation, thin: training",
            transform=axes.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        return figure

    return draw


if __name__ == "__main__":
    main()
