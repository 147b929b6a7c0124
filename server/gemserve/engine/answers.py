"""Greedy answers to many prompts of token ids, decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core


def answer_all(
    core: Core,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    adapter: LoadedAdapter | None = None,
) -> list[str]:
    """Greedy answers to prompts that are read whole. They share the engine's steps."""
    assert core.is_idle
    jobs: dict[Any, int] = {}
    texts = ["" for _ in prompts]
    for index, ids in enumerate(prompts):
        request = Request(
            request_id=f"answer-{index}",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            filter=FilterParams(method="none", keep=16),
            adapter=adapter,
        )
        jobs[core.add(request)] = index
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                texts[jobs[job]] += event.text
            elif isinstance(event, Finished):
                assert event.error is None, event.error
    return texts
