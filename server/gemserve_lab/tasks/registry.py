"""The evaluation tasks, by the name `gemserve eval` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemserve.calibration.search.example import Subtasks
from gemserve_lab.tasks import jsonl, longbench, needle, relevance, ruler
from gemserve_lab.tasks.example_file import ExampleFile

TASKS: dict[str, Subtasks] = {
    "needle": needle.SUBTASKS,
    "ruler": ruler.SUBTASKS,
    "relevance": relevance.SUBTASKS,
}
# The subtasks that a task runs by default. Other tasks run all of their subtasks.
DEFAULT_SUBTASKS: dict[str, tuple[str, ...]] = {"needle": ("single",)}
# Tasks that read examples from `--data`: the given subtasks, or all of them.
FILE_TASKS: dict[str, Callable[[Path, Sequence[str] | None], list[ExampleFile]]] = {
    "jsonl": jsonl.read_files,
    "longbench": longbench.read_files,
}
