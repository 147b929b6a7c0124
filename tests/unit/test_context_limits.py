"""What fits into the context, for a server and for `LLM`: one token more is another case."""

from __future__ import annotations

import pytest

from gemserve.errors import PromptTooLong
from gemserve.filtering.context_limits import ContextLimits
from gemserve.types import FilterParams
from tests.unit.test_document_cache import FakeAdapter
from tests.unit.test_filter_plan import FULL, SIEVE


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
            planner=FULL, params=whole, num_tokens=num_tokens, longest=10_000, adapter=adapter
        )
        assert limits.room == most + 1 - num_tokens
        if num_tokens > most:
            with pytest.raises(PromptTooLong, match=str(most)):
                limits.check_prompt("prompt")
        else:
            limits.check_prompt("prompt")


def test_only_what_is_kept_must_fit_unless_all_is_scored() -> None:
    """Scoring reads the whole prompt, whatever filter the request names."""
    rooms = [
        ContextLimits(
            planner=FULL, params=SIEVE, num_tokens=3900, longest=10_000, is_scored=is_scored
        ).room
        for is_scored in (False, True)
    ]
    assert rooms == [4000 - 64, 100]
