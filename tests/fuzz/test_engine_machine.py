"""A whole engine under requests, cancellations and failing passes, in any order.

`tests/model/test_cache_interleavings.py` draws what happens to the document cache: deletions,
evictions, reloads, restarts. Here it is what happens to requests: how they are sampled and stopped,
who sent them, what they score, and that a pass of one of them raises. Every request that does not
fail answers as it does alone, tokens and text, and nothing holds memory in the end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from gemserve.contract.events import Event, Filtered, Finished, PromptScored, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.errors import CapacityExceeded, RequestError
from gemserve.model.adapter import Adapter
from tests.cache_world import RandomPace
from tests.fuzz.cases import COUNTS, bounded, cases
from tests.fuzz.tiny import tiny_core

CONTEXT = 1200
TEXTS = [[3 + (7 * i * i + 13 * which) % 4000 for i in range(420)] for which in range(3)]


class Failing(Adapter):
    """Changes nothing, and raises in a pass after so many layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__("failing", "1")
        self.left = num_layers

    def shift(self, layer: int) -> torch.Tensor | None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("this pass fails")
        return None


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 1),
    temperature=st.sampled_from((0.0, 0.0, 0.8, 1.5)),
    top_p=st.sampled_from((1.0, 0.7)),
    top_k=st.sampled_from((0, 3)),
    min_p=st.sampled_from((0.0, 0.1)),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from((0.0, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    logit_bias=st.sampled_from(((), ((70, 8.0), (71, -100.0)))),
    stop=st.sampled_from(((), ("e", "th"), (" ",), ("never occurs",))),
    stop_token_ids=st.sampled_from(((), (70,), (100, 200))),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, None, 0, 2)),
)
FILTERS = st.builds(
    FilterParams,
    method=st.sampled_from(("sieve", "sieve", "gemfilter", "snapkv", "none", "random", "position")),
    keep=st.sampled_from((16, 48, 0.1)),
    fallback=st.just(False),
    return_selection=st.booleans(),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ids = draw(st.sampled_from(TEXTS))[: draw(st.sampled_from((3, 60, 300, 420)))]
    ids = ids + draw(st.lists(st.integers(3, 4000), min_size=1, max_size=30))
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=draw(SAMPLING),
        filter=draw(FILTERS),
        priority=draw(st.integers(-1, 1)),
        selects_only=draw(st.sampled_from((False, False, False, True))),
        prompt_logprobs=draw(st.sampled_from((None, None, None, 1))),
        question=draw(st.sampled_from(((), ((len(ids) - 3, len(ids)),)))),
        tenant=draw(st.sampled_from((b"one", b"two"))),
    )


def answer_of(events: list[Event]) -> tuple[Any, list[float]]:
    """What must be the same alone, and the log-probabilities, which may differ in the last bits."""
    last = events[-1]
    assert isinstance(last, Finished)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    reports = [event.report for event in events if isinstance(event, Filtered)]
    scored = [event for event in events if isinstance(event, PromptScored)]
    logprobs = [one.logprob for event in [*scored, *deltas] for one in event.logprobs]
    return (
        [(r.applied, r.reason, r.kept_tokens, r.selection) for r in reports],
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        (last.reason, last.completion_tokens, last.stop, last.error),
    ), logprobs


def check_order(events: list[Event]) -> None:
    """The report comes once and first, the scores next, and the end once and last."""
    kinds = [type(event) for event in events]
    assert kinds.count(Finished) == 1
    assert kinds[-1] is Finished
    assert kinds.count(Filtered) <= 1
    assert kinds.count(PromptScored) <= 1
    rank = {Filtered: 0, PromptScored: 1, TextDelta: 2, Finished: 3}
    ranks = [rank[kind] for kind in kinds]
    assert ranks == sorted(ranks)


class Engine(RuleBasedStateMachine):
    tokenizer: Any = None
    cold: Core

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[Job, list[Event]] = {}
        self.requests: dict[Job, Request] = {}

    @initialize(megabytes=st.sampled_from((0.4, 0.7, 4)), seed=st.integers(0, 999))
    def start(self, megabytes: float, seed: int) -> None:
        COUNTS["engine machine"] += 1
        self.core = tiny_core(
            self.tokenizer, CONTEXT, kv_memory_bytes=int(megabytes * (1 << 20)), cache_memory=0.6,
            filter_min_tokens=0, min_chunk_tokens=32, max_running=6,
        )  # fmt: skip
        shape = self.core.model.shape
        self.core._pace = RandomPace(Random(seed), shape.layer(0, 1))  # type: ignore[assignment]

    @rule(request=requests())
    def ask(self, request: Request) -> None:
        self._add(request)

    @rule(request=requests(), num_layers=st.integers(0, 60))
    def ask_what_fails(self, request: Request, num_layers: int) -> None:
        self._add(replace(request, adapter=Failing(num_layers)))

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        with bounded("", cpu_s=30):
            for _ in range(count):
                if self.core.is_idle:
                    break
                for job, event in self.core.step():
                    self._take(job, event)
                self.core.check_integrity()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        under_way = [job for job, events in self.events.items() if not _is_over(events)]
        if under_way:
            job = data.draw(st.sampled_from(range(len(under_way))))
            for ended, event in self.core.cancel(under_way[job]):
                self._take(ended, event)
            assert self.core.cancel(under_way[job]) == []
            self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(20_000):
            if self.core.is_idle:
                break
            self.step(30)
        assert self.core.is_idle, "requests wait for ever"
        assert self.core.kv_bytes_used == 0
        for job, events in self.events.items():
            check_order(events)
            self._compare(self.requests[job], events)

    def _add(self, request: Request) -> None:
        try:
            job = self.core.add(request)
        except (CapacityExceeded, RequestError):
            return
        self.events[job], self.requests[job] = [], request

    def _take(self, job: Job, event: Event) -> None:
        assert not _is_over(self.events[job]), "an event after the end"
        self.events[job].append(event)

    def _compare(self, request: Request, events: list[Event]) -> None:
        last = events[-1]
        assert isinstance(last, Finished)
        if last.reason == "abort":
            return
        if last.reason == "error":
            assert isinstance(request.adapter, Failing), last.error
            return
        alone = list(self.cold.run_alone(replace(request, adapter=None)))
        (found, some), (expected, others) = answer_of(events), answer_of(alone)
        assert found == expected, request
        assert len(some) == len(others)
        assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(some, others, strict=True))


def _is_over(events: list[Event]) -> bool:
    return bool(events) and isinstance(events[-1], Finished)


def test_requests_in_any_order(tokenizer: Any) -> None:
    Engine.tokenizer = tokenizer
    Engine.cold = tiny_core(tokenizer, CONTEXT, cache_memory=0.0, filter_min_tokens=0)
    run_state_machine_as_test(Engine, settings=cases(3, many_times=0.2, stateful_step_count=25))
