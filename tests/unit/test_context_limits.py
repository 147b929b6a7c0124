"""What fits into the context, for a server and for `LLM`: one token more is another case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import NO_BREAKS, Priority, ProtectedRange
from gemserve.errors import KeptTooLong, PromptTooLong
from gemserve.filtering.context_limits import ContextLimits
from gemserve.filtering.planner import FilterPlanner
from tests.unit.test_document_cache import FakeAdapter
from tests.unit.test_filter_plan import FULL, MEASURED, SIEVE, request

INSTRUCTIONS = (ProtectedRange(0, 300, Priority.SYSTEM),)


class Prefix(FakeAdapter):
    num_positions = 10


@pytest.mark.parametrize("num_positions", [0, 10])
def test_a_prompt_that_is_read_whole_leaves_room_for_one_token(num_positions: int) -> None:
    """One more was admitted, and its answer's first token had no position."""
    adapter = Prefix("x", "1") if num_positions else None
    most = FULL.context_tokens - num_positions - 1
    whole = FilterParams(method="none", keep=64)
    for num_tokens in (most, most + 1):
        limits = ContextLimits(
            planner=FULL,
            params=whole,
            num_tokens=num_tokens,
            protected=(),
            longest=10_000,
            adapter=adapter,
        )
        assert limits.room == most + 1 - num_tokens
        if num_tokens > most:
            with pytest.raises(PromptTooLong, match=f"is {most + 1} tokens.* One token has"):
                limits.check_prompt("prompt")
        else:
            limits.check_prompt("prompt")


def test_only_what_is_kept_must_fit_unless_all_is_scored() -> None:
    """Scoring reads the whole prompt, whatever filter the request names."""
    rooms = [
        ContextLimits(
            planner=FULL,
            params=SIEVE,
            num_tokens=3900,
            protected=protected,
            longest=10_000,
            is_scored=is_scored,
        ).room
        for is_scored in (False, True)
        for protected in ((), INSTRUCTIONS)
    ]
    assert rooms == [4000 - 64, 4000 - 64 - 300, 100, 100]


def kept_limits(params: FilterParams, num_tokens: int, adapter: Prefix | None) -> ContextLimits:
    return ContextLimits(
        planner=FULL,
        params=params,
        num_tokens=num_tokens,
        protected=INSTRUCTIONS,
        longest=100_000,
        adapter=adapter,
    )


@pytest.mark.parametrize("num_positions", [0, 10])
def test_what_is_always_read_must_fit_with_the_budget(num_positions: int) -> None:
    """A budget that fitted alone was admitted, with instructions for which there was no room."""
    adapter = Prefix("x", "1") if num_positions else None
    most = FULL.context_tokens - num_positions - 1
    fitting = FilterParams(method="position", keep=most - 300)
    limits = kept_limits(fitting, 50_000, adapter)
    limits.check_prompt("messages")
    assert (limits.read, limits.room) == (most, 1)
    with pytest.raises(KeptTooLong) as caught:
        kept_limits(replace(fitting, keep=most - 299), 50_000, adapter).check_prompt("messages")
    named = " with adapter 'x' (which takes 10)" if num_positions else ""
    assert str(caught.value) == (
        f"This model's maximum context length is {most + 1} tokens{named}. However, your prompt "
        f"contains {most + 1} input tokens. Please reduce the length of the messages. messages: "
        f"the filter would keep {most + 1} of 50000 tokens, and the context has room for "
        f"{most}{named}; 300 of them are instructions, tools, calls, the question and the "
        "template, which are always read; lower filter.keep, or shorten them. One token has to be "
        "left for the answer."
    )
    assert caught.value.param == "messages"
    assert caught.value.code == "context_length_exceeded"


def test_without_protection_a_budget_that_does_not_fit_is_alone_to_blame() -> None:
    """A method that protects nothing was told to shorten its instructions."""
    params = FilterParams(method="gemfilter", keep=3999)
    kept_limits(params, 50_000, None).check_prompt("prompt")
    with pytest.raises(KeptTooLong) as caught:
        kept_limits(replace(params, keep=4000), 50_000, None).check_prompt("prompt")
    assert str(caught.value).endswith(
        "prompt: the filter would keep 4000 of 50000 tokens, and the context has room for 3999; "
        "lower filter.keep. One token has to be left for the answer."
    )


def test_a_filter_pass_ends_where_the_positions_that_an_adapter_leaves_end() -> None:
    """An adapter's were not counted, and the pass read beyond the model's table of positions."""
    adapter = Prefix("x", "1")
    planner = replace(FULL, longest_pass=FULL.context_tokens - 1)

    def limits(num_tokens: int, planner: FilterPlanner, params: FilterParams) -> ContextLimits:
        return ContextLimits(
            planner=planner,
            params=params,
            num_tokens=num_tokens,
            protected=(),
            longest=100_000,
            adapter=adapter,
        )

    limits(3990, planner, SIEVE).check_prompt("prompt")
    with pytest.raises(PromptTooLong, match="is 3990 tokens with adapter 'x'"):
        limits(3991, planner, SIEVE).check_prompt("prompt")
    limits(5000, FULL, SIEVE).check_prompt("prompt")  # the server reads beyond the context
    for window, size in ((3744, 3734), (512, 512)):
        params = replace(SIEVE, window=window)
        limits(3991, planner, params).check_prompt("prompt")
        plan = planner.plan(request(params, 3991, adapter=adapter))
        assert plan.segments is not None
        assert plan.segments.size == size
    large = replace(planner, context_tokens=270, longest_pass=269)  # no room for a segment
    assert large.most_tokens(replace(SIEVE, window=512), (), 400, positions=10) == 260


def test_documents_leave_room_for_an_adapter() -> None:
    tokens, whole = np.arange(5000), [(0, 5000)]
    planner = replace(FULL, calibration=replace(MEASURED, window=3990))
    sizes = [
        plan.segments.size
        for positions in (0, 10)
        for _, plan in [
            planner.plan_documents(
                tokens, whole, NO_BREAKS, anchor=(1,), query=(2, 3), positions=positions
            )
        ]
        if plan.segments is not None
    ]
    assert sizes == [3990, 3987]
