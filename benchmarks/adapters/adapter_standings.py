"""How the contestants of `adapters.py --model` stand: what its finished runs say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapters.adapter_comparison import read_runs
from gemserve.evaluation.adapters.answer_rules import interval, paired

ZERO_SHOT, FEW_SHOT = "zero-shot", "few-shot"
Run = Mapping[str, Any]
Interval = tuple[float, float, float]  # a mean, and its lower and upper bound (95%)


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
    rows = [_row(standing, few) for standing in standings]
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


def _row(standing: Standing, few: Standing | None) -> dict[str, str]:
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
