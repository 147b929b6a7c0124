"""Chooses how many tokens `keep: "auto"` keeps of documents: as many as a model answers best from.

More tokens hold the answer more often, and beside it more that distracts. What weighs more depends
on the model: a small one answers best from a passage or two. So probes are answered by the engine
itself, from budgets of each size, and from small ones also after a second look. The best is chosen
if it is better than the largest by more than one answer, and the second look if it is much better:
it takes the time of reading a thousand tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.probes import Probe
from gemserve.calibration.search.result import KeepResult, rounded_mean
from gemserve.engine.core import Core
from gemserve.evaluation.metrics import score_answer
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
_ANSWER_TOKENS = 24
_WORTH_A_LOOK = 0.1  # of the share of right answers


def choose_keep(
    core: Core, calibration: Calibration, probes: Sequence[Probe], progress: Callable[[str], None]
) -> tuple[KeepResult, ...]:
    """Answer the probes from budgets of each size; the result that is chosen comes first.

    `calibration`: what was found so far. `probes`: documents that are longer than any budget.
    """
    planner = core.planner

    def measure(keep: int, look: SecondLook) -> KeepResult:
        found = replace(calibration, auto_keep=keep, second_look=True)
        core.planner = replace(planner, calibration=found, longest_pass=1 << 30, min_tokens=0)
        scores = []
        for probe in probes:
            scores.append(score_answer(_answer(core, probe, look), probe.example))
            progress(f"{probe.kind} probe, {keep} tokens kept")
        return KeepResult(keep=keep, second_look=look == "auto", score=rounded_mean(scores))

    try:
        rows = [measure(keep, "off") for keep in KEEPS]
        # a larger budget has room for most of what is looked at
        rows += [measure(keep, "auto") for keep in KEEPS if keep <= LOOKED_AT * LONGEST // 2]
    finally:
        core.planner = planner
    once, twice = rows[: len(KEEPS)], rows[len(KEEPS) :]
    best, largest = max(once, key=lambda row: (row.score, row.keep)), once[-1]
    if best.score - largest.score <= 1 / len(probes) + 1e-4:  # of rounded scores
        best = largest
    looked = max(twice, key=lambda row: (row.score, row.keep))
    if looked.score >= best.score + _WORTH_A_LOOK:
        best = looked
    return best, *(row for row in rows if row is not best)


def _answer(core: Core, probe: Probe, look: SecondLook) -> str:
    prompt = probe.example.prompt
    request = Request(
        request_id=uuid.uuid4().hex,
        **prompt.fields,
        sampling=SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0),
        filter=FilterParams(method="sieve", keep="auto", lexical="auto", second_look=look),
    )
    text = ""
    for event in core.run_alone(request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return text
