"""Chooses how many tokens `keep: "auto"` keeps of documents: as many as a model answers best from.

More tokens hold the answer more often, and beside it more that distracts, and all layers read them.
What weighs more depends on the model: a small one answers best from a passage or two. So questions
of probes are answered by the engine itself, from budgets of each size. The smallest budget is
chosen whose answers are about as good as the best: within one answer, and within a thirtieth of
them. From a small one they are answered also after a second look, which is chosen only if it is
much better: it takes the time of reading a thousand tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.result import KeepResult, rounded_mean
from gemserve.engine.core import Core
from gemserve.evaluation.metrics import score_answer
from gemserve.evaluation.tasks.example import Example
from gemserve.filtering.second_look import LONGEST, LOOKED_AT
from gemserve.types import (
    FilterParams,
    Finished,
    Request,
    SamplingParams,
    SecondLook,
    TextDelta,
)

KEEPS = (128, 256, 512, 1024)
PROBE_TOKENS = 4096
_TOLERANCE = 1 / 30  # of the share of right answers
_WORTH_A_LOOK = 0.1  # of that share
_MOST_LOOKED_AT = LOOKED_AT * LONGEST // 2  # the largest budget behind a second look


def choose_keep(
    core: Core,
    calibration: Calibration,
    examples: Sequence[Example],
    progress: Callable[[str, int, int], None],
) -> tuple[KeepResult, ...]:
    """Answer the examples from budgets of each size; the result that is chosen comes first.

    `calibration`: what was found so far. `examples`: of documents longer than any budget.
    """
    planner, done = core.planner, count(1)

    def measure(keep: int, look: SecondLook) -> KeepResult:
        found = replace(calibration, auto_keep=keep, second_look=True)
        core.planner = replace(planner, calibration=found, longest_pass=1 << 30, min_tokens=0)
        scores = []
        for example in examples:
            scores.append(score_answer(_answer(core, example, look), example))
            progress("answers", next(done), len(KEEPS) * len(examples))
        return KeepResult(keep=keep, second_look=look == "auto", score=rounded_mean(scores))

    try:
        once = [measure(keep, "off") for keep in KEEPS]
        tolerance = max(1 / len(examples), _TOLERANCE) + 1e-4  # of rounded scores
        most = max(row.score for row in once)
        # a model that answers nothing says nothing about budgets
        best = next(row for row in once if row.score >= most - tolerance) if most else once[-1]
        twice = []
        if best.keep <= _MOST_LOOKED_AT:  # a larger budget has room for most of what is looked at
            twice = [measure(best.keep, "auto")]
    finally:
        core.planner = planner
    rows = [*once, *twice]
    if twice and twice[0].score >= most + _WORTH_A_LOOK:
        best = twice[0]
    return best, *(row for row in rows if row is not best)


def _answer(core: Core, example: Example, look: SecondLook) -> str:
    prompt = example.prompt
    request = Request(
        request_id=uuid.uuid4().hex,
        **prompt.fields,
        sampling=SamplingParams(max_tokens=example.max_tokens, temperature=0.0),
        filter=FilterParams(method="sieve", keep="auto", lexical="auto", second_look=look),
    )
    text = ""
    for event in core.run_alone(request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return text
