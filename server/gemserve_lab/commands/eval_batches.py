"""The batches that `gemserve eval` runs: the checked options of a task, and its examples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import number, read_lengths, read_value
from gemserve.errors import ConfigError

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve.engine.core import Core
    from gemserve_lab.tasks.example_file import TooLong


GENERATED_TASKS = ("needle", "ruler", "relevance")
READ_TASKS = ("jsonl", "longbench")
GOLD_TASKS = ("jsonl",)  # file tasks whose files can say where an answer is
DEFAULT_LENGTHS = "1024,4096"
DEFAULT_SAMPLES = "20"
METRICS = {"contains": "contains", "exact": "items"}  # the values are names in evaluation.metrics


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """The examples of some subtasks. Every draw is made for every subtask.

    `settings`: settings that a stored outcome must have in common with this batch, besides those of
    the run. Each draw from a file has its own length.
    """

    subtasks: Any
    draws: list[Any]
    settings: dict[str, object] = field(default_factory=dict)


MakeBatches = Callable[["Core"], list[ExampleBatch]]


def generated_batches(arguments: argparse.Namespace, methods: list[str]) -> MakeBatches:
    """Check the options of a task that makes its examples.

    Lengths can be checked only with the model.
    """
    from gemserve.calibration.search.example import ExampleDraw, with_metric
    from gemserve_lab.methods_compared import longest_prompt
    from gemserve_lab.tasks.registry import DEFAULT_SUBTASKS, TASKS

    task = arguments.task
    if arguments.data is not None:
        raise ConfigError(f"data={arguments.data}: {task} makes its examples itself")
    if arguments.skip_too_long:
        raise ConfigError(f"skip-too-long: {task} makes its examples itself, see --lengths")
    lengths = read_lengths(arguments.lengths or DEFAULT_LENGTHS)
    samples = _samples(arguments.samples or DEFAULT_SAMPLES, lengths)
    available = TASKS[task]
    names = _subtasks(arguments) or DEFAULT_SUBTASKS.get(task, tuple(available))
    for name in names:
        if name not in available:
            raise ConfigError(f"subtasks={name}: must be among {', '.join(available)}")
    metric = METRICS[arguments.metric or "contains"]
    makers = {name: with_metric(available[name], metric) for name in names}

    def make_batches(core: Core) -> list[ExampleBatch]:
        limit = longest_prompt(core, methods)
        for length in lengths:
            if length > limit:
                raise ConfigError(f"lengths={length}: the longest prompt of this model is {limit}")
        draws = [
            ExampleDraw(seed=arguments.seed, num_tokens=length, index=index, samples=count)
            for length, count in zip(lengths, samples, strict=True)
            for index in range(count)
        ]
        return [ExampleBatch(makers, draws, {"metric": metric})]

    return make_batches


def file_batches(arguments: argparse.Namespace, methods: list[str]) -> MakeBatches:
    """Read the files of a task that takes its examples from there.

    Lengths can be checked only with the model.
    """
    from gemserve_lab.metrics import check_packages
    from gemserve_lab.tasks.example_file import check_gold, measure
    from gemserve_lab.tasks.registry import FILE_TASKS

    task = arguments.task
    if arguments.data is None:
        raise ConfigError(f"data: {task} needs --data, the path of its examples")
    if arguments.lengths is not None:
        raise ConfigError(
            f"lengths={arguments.lengths}: the prompts of {task} have the lengths they have"
        )
    if arguments.metric is not None:
        raise ConfigError(f"metric={arguments.metric}: {task} has a metric of its own")
    if "oracle" in methods and task not in GOLD_TASKS:
        raise ConfigError(f"methods=oracle: {task} does not say where in a prompt its answer is")
    given = arguments.samples
    count = None if given is None else read_value("samples", given, number(1))
    files = FILE_TASKS[task](arguments.data, _subtasks(arguments))
    files = [file.first(count) for file in files]
    check_packages(files)
    if "oracle" in methods:
        check_gold(files)

    def make_batches(core: Core) -> list[ExampleBatch]:
        batches: list[ExampleBatch] = []
        refused: list[TooLong] = []
        for file in files:
            draws, too_long = measure(core, file, arguments.seed)
            refused += too_long
            if draws:
                batches.append(
                    ExampleBatch({file.subtask: file.make}, draws, {"data": file.digest})
                )
        _report_too_long(refused, sum(len(file.cases) for file in files), arguments.skip_too_long)
        return batches

    return make_batches


def _report_too_long(refused: list[TooLong], total: int, is_skipping: bool) -> None:
    """Raise `ConfigError` for prompts that do not fit, or print that they are skipped."""
    if not refused:
        return
    first = refused[0]
    text = (
        f"{len(refused)} of {total} prompts are too long for this model or its KV memory: "
        f"{first.path}, line {first.line} has {first.tokens} tokens; {first.limit} leave room for "
        f"an answer of {first.max_tokens}"
    )
    if len(refused) == total:
        raise ConfigError(text)
    if not is_skipping:
        raise ConfigError(f"{text}; --skip-too-long runs the others")
    print(f"gemserve: left out: {text}", file=sys.stderr)


def _subtasks(arguments: argparse.Namespace) -> list[str] | None:
    given: str | None = arguments.subtasks
    return None if given is None else list(dict.fromkeys(given.split(",")))


def _samples(text: str, lengths: list[int]) -> list[int]:
    counts = [read_value("samples", part, int) for part in text.split(",")]
    if len(counts) == 1:
        counts *= len(lengths)
    if len(counts) != len(lengths):
        raise ConfigError(f"samples={text}: {len(counts)} numbers for {len(lengths)} lengths")
    for count in counts:
        if count < 1:
            raise ConfigError(f"samples={count}: must be at least 1")
    return counts
