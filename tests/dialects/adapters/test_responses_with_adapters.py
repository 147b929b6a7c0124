"""`/v1/responses` with adapters: what holds for the core's endpoints holds there."""

from __future__ import annotations

import pytest

from tests.api.adapters.adapter_requests import RESPONSES, ask, load
from tests.api.adapters.test_lifetime import _no_collector, test_a_request_that_ended_holds_nothing
from tests.api.adapters.test_using import (
    test_a_prefix_takes_its_room_in_the_context,
    test_a_request_names_it_either_way,
    test_requests_that_name_one_are_as_described,
    test_unknown_ones_are_a_404,
)
from tests.fakes import Api

__all__ = [
    "_no_collector",
    "test_a_prefix_takes_its_room_in_the_context",
    "test_a_request_names_it_either_way",
    "test_a_request_that_ended_holds_nothing",
    "test_requests_that_name_one_are_as_described",
    "test_unknown_ones_are_a_404",
]
pytestmark = pytest.mark.anyio


async def test_a_stream_echoes_the_model_as_it_was_named(served: Api) -> None:
    await load(served)
    reply = await ask(served, RESPONSES, model="fake:p", stream=True)
    assert '"model": "fake:p"' in reply.text
    assert '"model": "fake"' not in reply.text
