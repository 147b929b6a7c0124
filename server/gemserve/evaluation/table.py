"""The evaluation tasks, by the name `gemserve eval` takes."""

from __future__ import annotations

from gemserve.evaluation import needle, relevance, ruler
from gemserve.evaluation.example import Subtasks

TASKS: dict[str, Subtasks] = {
    "needle": needle.SUBTASKS,
    "ruler": ruler.SUBTASKS,
    "relevance": relevance.SUBTASKS,
}
# What a task runs unless told; the others run all they have.
DEFAULT_SUBTASKS: dict[str, tuple[str, ...]] = {"needle": ("single",)}
