"""How an answer is scored against what a right one says: 0 (wrong) to 1 (right)."""

from __future__ import annotations

from collections.abc import Callable

from gemserve.evaluation.example import Example


def items(text: str, example: Example) -> float:
    """1 if the answer lists exactly the expected items, in whatever order, and nothing else."""
    given = text.strip().removesuffix(".").split(",")
    return float(sorted(item.strip() for item in given) == sorted(example.answers))


METRICS: dict[str, Callable[[str, Example], float]] = {
    "items": items,
}
