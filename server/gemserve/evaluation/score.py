"""Run examples through a core's methods and score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from gemserve.engine.core import Core
from gemserve.evaluation.needle import Example
from gemserve.types import (
    Filtered,
    FilterMethod,
    FilterParams,
    FilterReport,
    Finished,
    Request,
    SamplingParams,
    TextDelta,
)

ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One example under one method. `recall`: share of the gold tokens that were kept."""

    score: float
    recall: float
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """Averages over the examples of one method, subtask and length."""

    method: str
    subtask: str
    prompt_tokens: int
    keep: int | float
    score: float
    recall: float
    kept_tokens: float
    n: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def evaluate(
    core: Core,
    examples: Iterable[Example],
    methods: Sequence[FilterMethod],
    keep: int | float,
    progress: Callable[[], None],
) -> list[Row]:
    """One row per method; every method sees the same examples. `progress` is called per answer."""
    outcomes: dict[FilterMethod, list[Outcome]] = {method: [] for method in methods}
    example: Example | None = None
    for example in examples:
        for method in methods:
            outcomes[method].append(run_example(core, example, method, keep))
            progress()
    assert example is not None
    return [
        Row(
            method=method,
            subtask=example.subtask,
            prompt_tokens=example.num_tokens,
            keep=keep,
            score=round(_mean([o.score for o in seen]), 4),
            recall=round(_mean([o.recall for o in seen]), 4),
            kept_tokens=round(_mean([o.kept_tokens for o in seen]), 1),
            n=len(seen),
        )
        for method, seen in outcomes.items()
    ]


def run_example(core: Core, example: Example, method: FilterMethod, keep: int | float) -> Outcome:
    """Generate greedily and compare the whole answer."""
    request = Request(
        request_id="eval",
        prompt_ids=example.prompt.ids,
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0),
        filter=FilterParams(method=method, keep=keep, return_selection=True),
        protected=example.prompt.protected,
    )
    text = ""
    report: FilterReport | None = None
    for event in core.run_alone(request):
        if isinstance(event, Filtered):
            report = event.report
        elif isinstance(event, TextDelta):
            text += event.text
        else:
            assert isinstance(event, Finished)
    assert report is not None
    assert report.selection is not None
    return Outcome(
        score=float(text.strip().removesuffix(".") == example.answer),
        recall=_recall(example.gold, report.selection),
        kept_tokens=report.kept_tokens,
    )


def _recall(gold: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> float:
    total = sum(stop - start for start, stop in gold)
    found = sum(
        max(0, min(stop, g_stop) - max(start, g_start))
        for g_start, g_stop in gold
        for start, stop in kept
    )
    return found / total


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
