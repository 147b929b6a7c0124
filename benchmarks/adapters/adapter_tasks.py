"""Writes the chats of a task that adapters are trained and tested on.

The labels are honest: they come from where a text is from, or from parsing it, and no model has
made them. Everything follows from the seed and from the Python that runs this. The folder gets
`train.jsonl`, `valid.jsonl`, `test.jsonl` and `task.json`, which has the rules that score answers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters.adapter_task_cases import Case, stdlib_functions, stdlib_paragraphs
from benchmarks.adapters.adapter_task_handbook import handbook_cases, handbook_text
from benchmarks.adapters.adapter_task_modules import module_cases
from benchmarks.adapters.adapter_task_notes import NOTE_PATTERN, note_cases
from benchmarks.adapters.adapter_task_records import record_cases

SPLITS = ("train", "valid", "test")
Sizes = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`make` returns the cases of each split. `rules`: names of `gemserve adapter eval --rule`.

    `max_tokens`: the longest answer. `texts`: further files for the folder, by name.
    """

    make: Callable[[Random, Sizes], dict[str, list[Case]]]
    rules: tuple[str, ...]
    max_tokens: int
    pattern: str | None = None
    texts: dict[str, Callable[[], str]] = field(default_factory=dict)


def by_group(cases: Sequence[Case], rng: Random, sizes: Sizes) -> dict[str, list[Case]]:
    """Give whole groups to the splits: 60% to train, 15% to valid, 25% to test.

    Labels take turns within a split, as long as there are enough of them.
    """
    groups = sorted({case.group for case in cases})
    rng.shuffle(groups)
    low, high = round(0.6 * len(groups)), round(0.75 * len(groups))
    split_of = {
        group: "train" if at < low else "valid" if at < high else "test"
        for at, group in enumerate(groups)
    }
    splits = {}
    for name in SPLITS:
        mine = [case for case in cases if split_of[case.group] == name]
        rng.shuffle(mine)
        splits[name] = _in_turn(mine)[: sizes[name]]
        rng.shuffle(splits[name])
    return splits


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    """The cases in an order in which their labels take turns."""
    by_label: dict[str, list[Case]] = {}
    for case in cases:
        by_label.setdefault(case.label, []).append(case)
    rounds = max((len(mine) for mine in by_label.values()), default=0)
    return [mine[at] for at in range(rounds) for mine in by_label.values() if at < len(mine)]


TASKS = {
    "modules": Task(
        make=lambda rng, sizes: by_group(module_cases(stdlib_paragraphs()), rng, sizes),
        rules=("exact",),
        max_tokens=12,
    ),
    "records": Task(
        make=lambda rng, sizes: by_group(record_cases(stdlib_functions()), rng, sizes),
        rules=("json", "fields"),
        max_tokens=96,
    ),
    "notes": Task(
        make=lambda rng, sizes: by_group(note_cases(stdlib_paragraphs()), rng, sizes),
        rules=("pattern", "exact"),
        max_tokens=64,
        pattern=NOTE_PATTERN,
    ),
    "handbook": Task(
        make=handbook_cases,
        rules=("contains",),
        max_tokens=24,
        texts={"handbook.txt": handbook_text},
    ),
}


def make_task(name: str, seed: int, sizes: Sizes) -> dict[str, list[Case]]:
    """The splits of a task. The same arguments give the same chats with the same Python."""
    return TASKS[name].make(Random(f"{name} {seed}"), sizes)


def write_task(name: str, folder: Path, seed: int, sizes: Sizes) -> dict[str, int]:
    """Write the files of a task. Returns how many chats each of them has."""
    task = TASKS[name]
    splits = make_task(name, seed, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    for split, cases in splits.items():
        lines = [json.dumps({"messages": case.messages}, ensure_ascii=False) for case in cases]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for file_name, text in task.texts.items():
        (folder / file_name).write_text(text())
    counts = {split: len(cases) for split, cases in splits.items()}
    told = {
        "task": name,
        "seed": seed,
        "rules": task.rules,
        "pattern": task.pattern,
        "max_tokens": task.max_tokens,
        "python": platform.python_version(),
        "sizes": counts,
    }
    (folder / "task.json").write_text(json.dumps(told, indent=1) + "\n")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--valid", type=int, default=100)
    parser.add_argument("--test", type=int, default=200)
    arguments = parser.parse_args()
    sizes = {split: getattr(arguments, split) for split in SPLITS}
    counts = write_task(arguments.task, arguments.out, arguments.seed, sizes)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
