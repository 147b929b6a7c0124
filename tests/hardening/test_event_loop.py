"""Requests whose plans or replies are large: the event loop, which serves everybody, stays free.

A fixture of all tests here fails if a loop works for 100 ms in one go. Each test makes sure that
the work was done at all.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.fakes import COMPLETIONS, wait_for
from tests.served import KEEP, PATIENCE_S, Served, prose

NUM_IDS = 24_000


def ids(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(300, 900) for _ in range(NUM_IDS)]


@pytest.mark.parametrize("method", ["random", "position"])
@pytest.mark.slow
def test_many_choices_are_planned_elsewhere(builtin: Served, method: str) -> None:
    """128 choices of 32,000 tokens were planned on the loop: nobody was answered for 3 seconds."""
    fields = {"n": 96, "max_tokens": 1, "seed": 1, "filter": {"method": method, "keep": 64}}
    reply = builtin.ask(COMPLETIONS, prompt=ids(1), **fields)
    assert len(reply["choices"]) == 96


@pytest.mark.parametrize("is_streamed", [False, True])
def test_many_log_probabilities_are_written_elsewhere(builtin: Served, is_streamed: bool) -> None:
    """64 choices of 199 tokens with 20 log-probabilities took 575 ms of the loop."""
    fields = {"n": 32, "max_tokens": 80, "logprobs": 20, "ignore_eos": True}
    reply = builtin.post(COMPLETIONS, prompt="Once upon a time", stream=is_streamed, **fields)
    assert reply.status_code == 200
    assert len(reply.content) > 32 * 80 * 20 * 10


@pytest.mark.slow
def test_scores_of_heads_are_written_elsewhere(builtin: Served, tokenizer: Any) -> None:
    prompt = f"{prose(tokenizer, NUM_IDS, seed=2)}\n\nWhat is the code for the lamb?"
    asked = {**KEEP, "return_scores": "heads", "window": "off"}
    reply = builtin.ask(COMPLETIONS, prompt=prompt, max_tokens=1, filter=asked)
    assert len(reply["filter"]["scores"]["heads"]) > 1


def test_thousands_of_ranges_are_written_elsewhere(builtin: Served) -> None:
    """A selection of 8,000 ranges made probes of `/health` wait 72 ms instead of 4."""
    asked = {"method": "random", "keep": NUM_IDS // 2, "return_selection": True}
    reply = builtin.ask("/v1/filter", prompt=ids(3), filter=asked)
    assert len(reply["filter"]["selection"]) > NUM_IDS / 8


def test_work_on_the_event_loop_is_noticed(
    builtin: Served, monkeypatch: pytest.MonkeyPatch, event_loops_are_free: list[str]
) -> None:
    """The fixture would pass whatever happened if the watch did not see it."""

    def work(_: Any) -> int:
        return sum(range(20_000_000)) % 7

    with monkeypatch.context() as patch:
        patch.setattr(type(builtin.serving.engine), "num_running", property(work))
        builtin.get("/load")
        wait_for(lambda: bool(event_loops_are_free), PATIENCE_S)
    event_loops_are_free.clear()
