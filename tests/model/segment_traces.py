"""Random traces of requests that are read in segments, answers compared with a cold engine's."""

from __future__ import annotations

from dataclasses import replace

from gemserve.contract.events import Filtered
from gemserve.contract.requests import Request
from gemserve.engine.sequence.job import Job
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.model.adapter import Adapter
from tests.cache_world import World
from tests.model.cache_traces import Asked, Key, Pass, Text, Trace, answer_of, as_tokens

SEGMENT = 256


class SegmentTrace(Trace):
    """Most requests are read in segments. Texts move: others come before them."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self._idle_job: Job | None = None  # the last one that has been noted
        self._tenant_of: dict[bytes, bytes] = {}  # by what the engine makes of its name

    def _ask(self) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            text = rng.choice(self._texts)
            moved = self._ids(rng.randrange(1, 90)) + text.ids
            if len(moved) < 900:
                self._texts.append(Text(moved, text.number))
        super()._ask()
        if self._folder is not None and rng.random() < 0.3:
            self._lose_memory()

    def _lose_memory(self) -> None:
        """Let everything be written, and then give up what nobody uses."""
        core = self._core
        while core._disk.has_work:
            core._disk.work()
            core._runner.change_memory(core._pool.take_changes())
            core._disk.wait(0.02)
        core._scheduler.cache.make_room(core.num_units)
        core._runner.change_memory(core._pool.take_changes())
        core.check_integrity()

    def _request(self, ids: list[int], adapter: Adapter | None) -> Request:
        request = super()._request(ids, adapter)
        if request.filter.method != "sieve" or self._rng.random() < 0.1:
            return request
        may_read_whole = self._rng.random() < 0.3
        params = replace(request.filter, window=SEGMENT, may_read_whole=may_read_whole)
        return replace(request, filter=params, anchor=(1, 2))

    def _step(self) -> None:
        """What is read whole in idle time is found by others, too."""
        super()._step()
        job = self._core._idle_job
        if job is None or job is self._idle_job:
            return
        self._idle_job, request = job, job.request
        documents = frozenset(request.documents)
        if documents.isdisjoint(self._forgotten):
            key = (self._name, self._tenant_of[request.tenant], None, None)
            self._read.append(Pass(key, as_tokens(request.prompt_ids), documents))

    def _check_answer(self, asked: Asked) -> None:
        """A prompt that was cached whole is answered as one that is not filtered."""
        (report,) = (event.report for event in asked.events if isinstance(event, Filtered))
        if report.reason != "cached":
            super()._check_answer(asked)
            return
        assert asked.request.filter.may_read_whole
        assert report.cached_tokens > 0
        self._outcome.read_from_cache += 1
        params = replace(asked.request.filter, method="none")
        whole = replace(asked.request, filter=params, pin=False)
        expected = answer_of(list(self._cold.run_alone(whole)))
        assert answer_of(asked.events)[1:] == expected[1:], asked.request

    def _note_segments(self, job: Job, key: Key) -> None:
        plan, documents = job.sequence.plan, frozenset(job.request.documents)
        self._tenant_of[job.sequence.request.tenant] = key[1]
        if plan.segments is not None:
            of_segments = (*key, "windows")
            self._read += [Pass(of_segments, w.name, documents) for w in plan.segments.segments]

    def _check_hit(self, asked: Asked, event: Filtered, sequence: LiveSequence) -> None:
        """A segment that was found must be one that a request of the same key was to read."""
        segments, report = sequence.plan.segments, event.report
        if report.reason == "cached":  # see `_check_whole` for what it found
            assert (report.layer, report.windows, report.cached_windows) == (None, None, None)
            return
        if segments is None:
            super()._check_hit(asked, event, sequence)
            return
        assert report.windows == len(segments.segments)
        assert (report.cached_tokens > 0) == bool(report.cached_windows)
        of_segments = (*asked.key, "windows")
        known = {one.tokens for one in self._read + asked.had if one.key == of_segments}
        found = sum(segment.name in known for segment in segments.segments)
        assert (report.cached_windows or 0) <= found
        self._outcome.left_out += report.cached_tokens
        self._outcome.segments += report.windows
        self._outcome.cached_windows += report.cached_windows or 0
