"""The engine shows the control tokens that mark calls, where a request asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemserve.contract.events import TextDelta
from tests.model.test_query_rows import core_of, ids_of, request

MARKER = 5


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_marker_that_is_drawn(is_shown: bool) -> None:
    core = core_of()
    core._markers = {MARKER: "[ARGS]"}
    one = request(ids_of(40, 1), ((20, 40),))
    sampling = replace(one.sampling, max_tokens=3, ignore_eos=True, logit_bias=((MARKER, 100.0),))
    core.add(replace(one, sampling=sampling, shows_markers=is_shown))
    events = []
    while not core.is_idle:
        events += [event for _, event in core.step()]
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [token for delta in deltas for token in delta.token_ids] == [MARKER] * 3
    shown = "".join(delta.text for delta in deltas)
    assert shown.count("[ARGS]") == (3 if is_shown else 0)
