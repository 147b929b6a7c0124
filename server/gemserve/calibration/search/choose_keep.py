"""Chooses how many tokens `keep: "auto"` keeps of documents at most.

More tokens hold the answer more often, and beside it more that distracts, and all layers read them.
What weighs more depends on the model: a small one answers best from a passage or two. So questions
of probes are answered by the engine itself, from budgets of each size. The smallest budget is
chosen whose answers are about as good as the best: within one answer or a thirtieth of them,
whichever is more; less than 256 tokens only if that is better than all larger ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.example import Example, contains
from gemserve.calibration.search.result import KeepResult, rounded_mean
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core

KEEPS = (128, 256, 512, 1024)
PROBE_TOKENS = 4096
_ENOUGH = 256  # a smaller budget must be clearly better: it holds one passage or two
_LEAST_SCORE = 0.15  # of right answers from some budget
_TOLERANCE = 1 / 30  # of the share of right answers


def choose_keep(
    core: Core,
    calibration: Calibration,
    examples: Sequence[Example],
    progress: Callable[[str, int, int], None],
) -> tuple[tuple[KeepResult, ...], float]:
    """Answer the examples from budgets of each size, and from whole prompts.

    Of the budgets the one that is chosen comes first; the share of right answers from whole prompts
    follows. `calibration`: what was found so far. `examples`: of documents longer than any budget.
    """
    planner, done = core.planner, count(1)
    core.planner = replace(planner, calibration=calibration, longest_pass=1 << 30, min_tokens=0)

    def score(params: FilterParams) -> float:
        scores = []
        for example in examples:
            scores.append(contains(_answer(core, example, params), example))
            progress("answers", next(done), (len(KEEPS) + 1) * len(examples))
        return rounded_mean(scores)

    def measure(keep: int) -> KeepResult:
        params = FilterParams(method="sieve", keep=keep, lexical="auto")
        return KeepResult(keep=keep, score=score(params))

    try:
        rows = [measure(keep) for keep in KEEPS]
        whole = score(FilterParams(method="none", keep=KEEPS[-1]))
    finally:
        core.planner = planner
    tolerance = max(1 / len(examples), _TOLERANCE) + 1e-4  # of rounded scores
    most = max(row.score for row in rows)
    # a model that answers next to nothing says nothing about budgets
    good = [row for row in rows if row.score >= most - tolerance]
    good = good if most >= _LEAST_SCORE else rows[-1:]
    best = next((row for row in good if row.keep >= _ENOUGH), good[0])
    return (best, *(row for row in rows if row is not best)), whole


def _answer(core: Core, example: Example, params: FilterParams) -> str:
    prompt = example.prompt
    request = Request(
        request_id=uuid.uuid4().hex,
        **prompt.fields,
        sampling=SamplingParams(max_tokens=example.max_tokens, temperature=0.0),
        filter=params,
    )
    text = ""
    for event in core.run_alone(request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return text
