"""Random traces of agents: requests that begin with instructions, over an engine with a cache.

What is kept of such prompts begins alike, and later choices go on from earlier ones.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.requests import Request
from gemserve.engine.cache.common_tokens import as_tokens, num_common
from gemserve.engine.sequence.job import Job
from gemserve.model.adapter import Adapter
from tests.cache_world import WINDOWED, World
from tests.model.cache_traces import Asked, Outcome, Pass, Text, Trace

_QUESTION = 8


@dataclass(slots=True)
class AgentOutcome(Outcome):
    """`kept`: prompts of which a part was read that begins alike.

    `kept_hits`: those of them that took over their beginning.
    """

    kept: int = 0
    kept_hits: int = 0


class AgentTrace(Trace):
    """One random trace of agents' growing chats. `run` raises at the first thing that is wrong."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        rng = self._rng
        self._outcome: Any = AgentOutcome()
        self._whole_share = rng.choice((0.0, 0.3))
        # two agents whose instructions begin alike, and one with few
        first = self._ids(rng.randrange(256, 420))
        second = first[: rng.randrange(200, 300)] + self._ids(rng.randrange(40, 200))
        self._instructions = [first, second, self._ids(rng.randrange(2, 256))]
        self._texts = [
            Text(ids + self._ids(rng.randrange(40, 300)), number)
            for number, ids in enumerate(self._instructions)
        ]
        self._ended: defaultdict[Job, int] = defaultdict(int)

    def _request(self, ids: list[int], adapter: Adapter | None) -> Request:
        rng = self._rng
        request = super()._request(ids, adapter)
        method: Any = request.filter.method
        if rng.random() < 0.25:
            others = ["snapkv"] * (self._name != WINDOWED)
            method = rng.choice(["position", "random", "gemfilter", *others])
            params = FilterParams(method=method, keep=rng.choice((32, 0.2)), return_selection=True)
            request = replace(request, filter=params)
        return replace(request, protected=tuple(self._ranges(ids)))

    def _ranges(self, ids: list[int]) -> list[ProtectedRange]:
        """Protect the instructions that `ids` begin with, the question, and some in between."""
        rng, size = self._rng, len(ids)
        most = max(num_common(as_tokens(ids), as_tokens(one)) for one in self._instructions)
        ranges = [
            ProtectedRange(0, most, Priority.SYSTEM),
            ProtectedRange(size - _QUESTION, size, Priority.QUESTION),
        ]
        if rng.random() < 0.4:
            at = rng.randrange(size)
            stop = min(size, at + rng.randrange(1, 80))
            ranges.append(ProtectedRange(at, stop, rng.choice((Priority.FRAME, Priority.TOOLS))))
        if rng.random() < 0.2:
            ranges.append(ProtectedRange(most, min(size, most + 32), Priority.HEAD))
        return ranges

    def _step(self) -> None:
        for job, event in self._core.step():
            assert not self._ended[job], "an event behind the last one"
            asked = self._asked[job]
            asked.events.append(event)
            if isinstance(event, Filtered):
                self._check_pass(asked, event, job)
                self._check_report(asked, event)
            elif isinstance(event, TextDelta) and job.sequence.begins_alike:
                self._check_kept(asked, job)
            elif isinstance(event, TextDelta) and job.sequence.is_whole:
                self._check_whole(asked, job)
            elif isinstance(event, Finished):
                self._ended[job] += 1
                del self._asked[job]
                self._check_answer(asked)
        self._core.check_integrity()
        assert self._forgotten.isdisjoint(self._core.stored_documents)

    def _check_pass(self, asked: Asked, event: Filtered, job: Job) -> None:
        """The filter's pass; of a prompt without one nothing is known yet."""
        if event.report.layer is None and job.sequence.begins_alike:
            assert not event.report.cached_tokens or job.sequence.num_reused
            return
        self._check_cached(asked, event, as_tokens(asked.request.prompt_ids))

    def _check_report(self, asked: Asked, event: Filtered) -> None:
        report, params = event.report, asked.request.filter
        assert report.prompt_tokens == len(asked.request.prompt_ids)
        if report.selection is not None:
            kept = [p for start, stop in report.selection for p in range(start, stop)]
            assert len(kept) == report.kept_tokens
        if report.reason is None and isinstance(params.keep, int):
            assert report.kept_tokens - report.protected_tokens <= params.keep
        assert report.protected_tokens <= report.kept_tokens

    def _check_kept(self, asked: Asked, job: Job) -> None:
        """What a choice takes over must begin an earlier choice, or a prompt read whole."""
        if any(isinstance(event, TextDelta) for event in asked.events[:-1]):
            return
        sequence, key = job.sequence, (*asked.key[:-1], None)
        kept = as_tokens([asked.request.prompt_ids[p] for p in sequence.chosen])
        self._check_in_common(asked, key, sequence.num_reused, kept)
        assert sequence.num_reused < sequence.num_kept
        self._outcome.kept += 1
        self._outcome.kept_hits += sequence.num_reused > 0
        documents = frozenset(asked.request.documents)
        if documents.isdisjoint(self._forgotten):
            self._read.append(Pass(key, kept, documents))
