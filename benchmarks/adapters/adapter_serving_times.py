"""How long requests with an adapter take when they are served: to a first token, and each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.shared import harness
from gemserve.engine.core import Core
from gemserve.evaluation.adapters.chats import Question
from gemserve.model.adapter import Adapter
from gemserve.types import FilterParams, Finished, Request, SamplingParams, TextDelta

_STEPS = 20
_TOKENS = 400  # of an answer: the first one still decodes when the last prompt has been read


def served(
    core: Core, adapter: Adapter | None, questions: Sequence[Question], repeats: int
) -> dict[str, float]:
    """Medians in ms: to a question's first token, and of decode steps of eight sequences.

    In the mixed batch half of the sequences have no adapter, and all have a filter.
    """
    vocab = core.model.vocab_size
    plain = [_request(harness.random_ids(256, vocab, seed), adapter, _TOKENS) for seed in range(8)]
    mixed = [
        _request(
            harness.random_ids(1024, vocab, seed),
            adapter if seed % 2 else None,
            _TOKENS,
            FilterParams(method="sieve", keep=256),
        )
        for seed in range(8)
    ]
    return {
        "ttft_ms": first_token_ms(core, adapter, questions, repeats),
        "decode_ms": 1e3 * step_seconds(core, plain),
        "mixed_ms": 1e3 * step_seconds(core, mixed),
    }


def first_token_ms(
    core: Core, adapter: Adapter | None, questions: Sequence[Question], repeats: int
) -> float:
    """The median time to a question's first token. Each question is asked alone."""
    firsts = []
    for question in questions[: repeats + 1]:
        ids = question.example.ids[: question.example.num_prompt]
        started_s = time.perf_counter()
        for event in core.run_alone(_request(ids, adapter, 2)):
            if isinstance(event, TextDelta):
                firsts.append(time.perf_counter() - started_s)
                break
        while not core.is_idle:
            core.step()
    return 1e3 * statistics.median(firsts[1:])  # the first one warms up


def _request(
    ids: Sequence[int],
    adapter: Adapter | None,
    max_tokens: int,
    chosen: FilterParams | None = None,
) -> Request:
    return Request(
        request_id="benchmark",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        filter=chosen or FilterParams(method="none", keep=16),
        adapter=adapter,
    )


def step_seconds(core: Core, requests: Sequence[Request]) -> float:
    """The median time of `_STEPS` steps in which all requests decode. Then they are cancelled."""
    jobs = [core.add(request) for request in requests]
    steps: list[float] = []
    while len(steps) < _STEPS and not core.is_idle:
        started_s = time.perf_counter()
        events = core.step()
        if sum(isinstance(event, TextDelta) for _, event in events) == len(requests):
            steps.append(time.perf_counter() - started_s)
        errors = [e.error for _, e in events if isinstance(e, Finished) and e.error]
        assert not errors, errors
    for job in jobs:
        core.cancel(job)
    while not core.is_idle:
        core.step()
    return statistics.median(steps)
