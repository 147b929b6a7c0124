"""Tables and pictures of what adapters learn, from the runs of `comparison.py --model --out FILE`.

For each task: a Markdown table, a picture of the scores against the number of parameters, and one
of the losses in training.

    python benchmarks/adapters/pictures.py runs.jsonl \
        --out docs/pictures --markdown tables.md
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.shared.finished_runs import read_runs
from gemserve_client.load_test.pictures import LIGHT, Draw, Theme, png
from gemserve_train.evaluation.answer_rules import interval, paired

ZERO_SHOT, FEW_SHOT = "zero-shot", "few-shot"
Run = Mapping[str, Any]
Interval = tuple[float, float, float]  # a mean, and its lower and upper bound (95%)
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


@dataclass(frozen=True, slots=True)
class Standing:
    """A contestant with one setting. `runs` are alike but for their seeds."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return str(self.runs[0]["contestant"])

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def parameters(self) -> int:
        return int(self.runs[0]["parameters"])

    @property
    def rules(self) -> list[str]:
        """The rules that answers were scored by. The first one is the score."""
        return list(self.runs[0]["scores"])

    def by_question(self, rule: str) -> list[float]:
        """A score for each question: the mean over the seeds."""
        columns = zip(*(run["scores"][rule] for run in self.runs), strict=True)
        return [statistics.fmean(column) for column in columns]

    @property
    def score(self) -> Interval:
        """Wilson's interval over questions. It is too wide for means over several seeds."""
        scores = self.by_question(self.rules[0])
        return statistics.fmean(scores), *interval(scores)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest score of a seed."""
        scores = [statistics.fmean(run["scores"][self.rules[0]]) for run in self.runs]
        return min(scores), max(scores)

    def difference(self, other: Standing) -> Interval | None:
        """The mean difference of score on the same questions. None: they are not the same."""
        ours, theirs = (s.by_question(s.rules[0]) for s in (self, other))
        if self.rules[0] != other.rules[0] or len(ours) != len(theirs):
            return None
        return paired(ours, theirs)

    def median(self, name: str) -> float | None:
        """The median over the seeds of a number that a run may lack."""
        known = [run[name] for run in self.runs if run.get(name) is not None]
        return statistics.median(known) if known else None


def read_standings(paths: Iterable[Path]) -> dict[tuple[str, str], list[Standing]]:
    """The standings by model and task, in the order of the runs.

    Of runs with the same setting and seed the last one counts. Raises `FileNotFoundError`.
    """
    tasks: dict[tuple[str, str], dict[tuple[Any, ...], dict[int, Run]]] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(path)
        for run in read_runs(path):
            num_questions = len(next(iter(run["scores"].values())))
            setting = (run["contestant"], run["rate"], run["examples"], run["minutes"])
            groups = tasks.setdefault((run["model"], run["task"]), {})
            groups.setdefault((*setting, num_questions), {})[run["seed"]] = run
    return {
        task: [Standing(tuple(seeds[seed] for seed in sorted(seeds))) for seeds in groups.values()]
        for task, groups in tasks.items()
    }


def chosen(standings: Sequence[Standing]) -> list[Standing]:
    """One setting of each contestant: that of most seeds, then that of the lowest validation loss.

    The test score does not decide.
    """

    def order(standing: Standing) -> tuple[int, float]:
        loss = standing.median("eval_loss")
        return -len(standing.runs), float("inf") if loss is None else loss

    names = dict.fromkeys(standing.name for standing in standings)
    return [min((s for s in standings if s.name == name), key=order) for name in names]


def find_kind(standings: Iterable[Standing], kind: str) -> Standing | None:
    """The first standing of this kind."""
    return next((standing for standing in standings if standing.kind == kind), None)


def markdown(standings: Sequence[Standing]) -> str:
    """A Markdown table with a row for each standing, and a sentence about how it was measured.

    A column that nothing is known of is left out.
    """
    few = find_kind(chosen(standings), FEW_SHOT)
    rows = [_table_row(standing, few) for standing in standings]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    first = standings[0]
    asked = len(first.by_question(first.rules[0]))
    told = (
        f"The score is the rule `{first.rules[0]}` on {asked} questions, as the mean over the "
        "seeds, with its 95% interval over questions."
    )
    if few is not None:
        told += (
            f" Differences to {few.name} are paired by question, with means over the seeds; those "
            "whose interval lacks 0 are bold."
        )
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{told}\n\n{table}\n"


def _table_row(standing: Standing, few: Standing | None) -> dict[str, str]:
    """The cells of a row, by column. A cell is empty if nothing is known."""
    mean, low, high = standing.score
    lowest, highest = standing.spread
    rates = [run["rate"] for run in standing.runs if run["rate"] is not None]
    count = len(standing.runs)
    row = {
        "contestant": standing.name,
        "parameters": f"{standing.parameters:,}",
        "rate": f"{rates[0]:g}" if rates else "",
        "score (95%)": f"{mean:.3f} ({low:.3f} to {high:.3f})",
        "seeds: lowest to highest": f"{count}: {lowest:.3f} to {highest:.3f}",
        "difference to few-shot (95%)": "",
    }
    gap = None if few is None or standing is few else standing.difference(few)
    if gap is not None:
        text = f"{gap[0]:+.3f} ({gap[1]:+.3f} to {gap[2]:+.3f})"
        row["difference to few-shot (95%)"] = text if gap[1] <= 0 <= gap[2] else f"**{text}**"
    for rule in standing.rules[1:]:
        row[f"`{rule}`"] = f"{statistics.fmean(standing.by_question(rule)):.3f}"
    numbers = {
        "loss": ("loss", ".3f"),
        "training, s": ("train_s", ".0f"),
        "TTFT, ms": ("ttft_ms", ".1f"),
        "decode step, ms": ("decode_ms", ".1f"),
        "mixed step, ms": ("mixed_ms", ".1f"),
    }
    for column, (name, form) in numbers.items():
        value = standing.median(name)
        row[column] = "" if value is None else format(value, form)
    return row


if __name__ == "__main__":
    main()
