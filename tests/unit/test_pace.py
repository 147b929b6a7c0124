from __future__ import annotations

import pytest

from gemserve.engine.scheduling.pace import LEAST_PER_DECODE, MOST_PER_DECODE, Crowd, Pace

NOBODY = Crowd(decoding=0, unread=1)
FEW_PROMPTS = Crowd(decoding=8, unread=1)


def test_work_of_no_cost_teaches_nothing() -> None:
    """A division by zero."""
    pace = Pace(0.25)
    pace.observe_pass(0.1, 0.0)
    assert pace.piece_cost(NOBODY) == 0
    pace.observe_pass(0.1, 100.0)
    assert pace.piece_cost(NOBODY) > 0


@pytest.mark.parametrize(
    ("crowd", "multiple"),
    [
        (FEW_PROMPTS, LEAST_PER_DECODE),
        (Crowd(decoding=8, unread=8), LEAST_PER_DECODE),
        (Crowd(decoding=4, unread=8), 2 * LEAST_PER_DECODE),
        (Crowd(decoding=1, unread=15), MOST_PER_DECODE),
    ],
)
def test_the_more_prompts_wait_for_each_stream_the_longer_they_are_read(
    crowd: Crowd, multiple: float
) -> None:
    """Sixteen long prompts were read at the pace of one or two streams, which starved them."""
    pace = Pace(10.0)
    pace.observe_decode(0.1)
    assert pace.slice_s(crowd) == pytest.approx(0.1 * multiple)


def test_a_slice_is_never_longer_than_the_target() -> None:
    pace = Pace(0.25)
    pace.observe_decode(0.1)
    assert pace.slice_s(Crowd(decoding=1, unread=100)) == 0.25
    assert pace.slice_s(NOBODY) == 0.25


def test_a_decode_step_is_due_once_prompts_have_had_their_time() -> None:
    pace = Pace(0.25)
    pace.observe_decode(0.05)
    many = Crowd(decoding=1, unread=100)
    pace.observe_slice(0.08)
    assert pace.is_decode_due(FEW_PROMPTS)
    assert not pace.is_decode_due(many)
    assert pace.slice_s(many) == pytest.approx(0.25 - 0.08)
    pace.observe_decode(0.05)
    assert not pace.is_decode_due(FEW_PROMPTS)


def test_pieces_are_shorter_beside_streams() -> None:
    pace = Pace(0.25)
    pace.observe_pass(0.1, 100.0)
    pace.observe_decode(0.03)
    assert pace.piece_cost(FEW_PROMPTS) < pace.piece_cost(NOBODY)
