"""What a reader with other tokens does for prompts that the model cannot read whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange, StandsFor
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.reader import ReadJob, _with_choice
from gemserve.engine.sequence.step_plan import Kept
from gemserve.errors import ContextExceeded, RequestError
from gemserve.filtering.context_limits import ContextLimits
from gemserve.filtering.planner import FilterPlanner
from gemserve.filtering.reading_plans import ReaderPlans, Translate
from tests.unit.test_filter_plan import FULL, request

CONTEXT, ANSWER, TEMPLATE = 4000, 100, 8
OWN = replace(FULL, min_tokens=512, longest_sequence=CONTEXT, longest_pass=CONTEXT - 1)
SIZES = [
    (system, document)
    for system in (0, 200, 1700, 3400, 3800, 3950)
    for document in (65, 100, 250, 513, 900, 2300, 3899, 3900, 3901, 9000)
]


def translating(width: int) -> Translate:
    """To a reader whose tokens are `width` times as long, and whose template has 8 tokens."""

    def translate(request: Request, documents: Sequence[tuple[int, int]]) -> Request:
        positions = np.array([p for low, high in documents for p in range(low, high)])
        blank = np.zeros(TEMPLATE, dtype=np.int64)
        starts = np.concatenate([positions[::width], blank])
        stops = np.concatenate([positions[::width] + width, blank])
        stops = np.minimum(stops, len(request.prompt_ids))
        size = len(starts)
        return replace(
            request,
            prompt_ids=[7] * size,
            protected=(ProtectedRange(size - TEMPLATE, size, Priority.QUESTION),),
            question=(),
            stands_for=StandsFor(starts=starts, stops=stops),
        )

    return translate


def planner_with(width: int) -> FilterPlanner:
    return replace(OWN, reader=ReaderPlans.of(OWN, OWN, translating(width)))


def asked(system: int, document: int, **params: Any) -> Request:
    return request(
        FilterParams(method="sieve", keep=64, reader="reader", window=512, **params),
        system + document,
        (),
        sampling=SamplingParams(max_tokens=ANSWER),
        protected=(ProtectedRange(0, system, Priority.SYSTEM),) if system else (),
    )


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_what_is_admitted_fits(width: int, fallback: bool) -> None:
    """The reader's shorter prompt decided, and prompts beyond the context were read whole."""
    planner, num_filtered, num_beyond = planner_with(width), 0, 0
    for system, document in SIZES:
        made = asked(system, document, fallback=fallback)
        limits = ContextLimits(
            planner=planner,
            params=made.filter,
            num_tokens=system + document,
            protected=made.protected,
            longest=100_000,
        )
        try:
            limits.check_prompt("prompt")
            limits.check_answer(ANSWER, "max_tokens", "prompt")
        except ContextExceeded:
            continue
        planned = planner.planned(made)
        assert planned.plan is not None
        assert planned.plan.num_kept + ANSWER <= CONTEXT
        if planned.reading is None:
            continue
        num_filtered += 1
        num_beyond += system + document + ANSWER > CONTEXT
        assert planned.plan.budget.limit + ANSWER <= CONTEXT
        of_reader = planned.reading.plan
        assert of_reader is not None
        is_all = of_reader.budget.limit == len(planned.reading.prompt_ids)
        assert is_all == (fallback and system + document + ANSWER <= CONTEXT)
        whole = Kept(positions=range(len(planned.reading.prompt_ids)), ids=())
        job: Any = type("Reading", (), {"request": planned.reading})
        answered = _with_choice(ReadJob(planned, job), whole).plan
        assert answered is not None
        assert answered.num_kept <= planned.plan.budget.limit
    assert num_filtered > num_beyond > 10


def test_documents_that_are_too_short_for_the_reader_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        planner_with(8).planned(asked(3835, 66))
    assert str(caught.value) == (
        "filter.reader=reader: the prompt of 3901 tokens must be filtered, and its documents have "
        "9 of the reader's tokens, too few to choose from; filter.reader=self has the model itself "
        "look"
    )
    assert caught.value.param == "filter.reader"


def test_a_filter_that_failed_open_keeps_a_prompt_that_fits() -> None:
    planner = planner_with(3)
    planned = planner.planned(asked(200, 3000))
    assert planned.reading is not None
    job: Any = type("Reading", (), {"request": planned.reading})
    everything = range(len(planned.reading.prompt_ids))
    whole = Kept(positions=everything, ids=(), has_failed=True)
    plan = _with_choice(ReadJob(planned, job), whole).plan
    assert plan is not None
    assert (plan.num_kept, plan.chosen) == (3200, None)
