"""Random traces over an engine with a document cache, each answer compared with a cold engine's.

A trace is made from its seed alone: what the engine would do by the clock is drawn as well.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.cache.common_tokens import as_tokens, num_common
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.errors import CapacityExceeded, RequestError
from gemserve.model.adapter import Adapter
from tests import models
from tests.cache_world import (
    HAS_DISK,
    OTHER_WEIGHTS,
    WINDOWED,
    World,
    copy_files,
    damage_file,
    new_core,
)

Answer = tuple[Any, ...]
Key = tuple[Any, ...]
MOST_TOKENS = 1000  # of a prompt


@dataclass(slots=True)
class Outcome:
    """What happened in a trace. `left_out`: tokens that passes took over from the cache.

    `whole_hits`: prompts that were read whole but for what they took over.
    """

    answers: int = 0
    hits: int = 0
    evictions: int = 0
    cancelled: int = 0
    forgotten: int = 0
    wiped: int = 0
    restarts: int = 0
    disk_hits: int = 0
    damaged: int = 0
    left_out: int = 0
    whole_hits: int = 0
    segments: int = 0
    cached_windows: int = 0
    read_from_cache: int = 0
    disk_segments: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Tokens that prompts begin with. `number`: which stored document they begin with."""

    ids: list[int]
    number: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that has ended, and may be in the cache until a document in it is forgotten."""

    key: Key
    tokens: Any
    documents: frozenset[str]


@dataclass(slots=True)
class Asked:
    """A request in flight, and its events so far.

    `had`: passes that were forgotten after it was admitted, so it may have taken over their tokens.
    """

    request: Request
    key: Key
    number: int
    events: list[Event] = field(default_factory=list)
    had: list[Pass] = field(default_factory=list)


def answer_of(events: list[Event]) -> Answer:
    """What must not depend on a cache: what was kept and why, and the tokens of the answer."""
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason != "error", last.error
    tokens = [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]
    return report.reason, report.kept_tokens, report.selection, last.reason, tuple(tokens)


class Trace:
    """One random trace. `run` raises `AssertionError` at the first thing that is wrong."""

    def __init__(self, world: World, seed: int) -> None:
        self._rng = rng = Random(seed)
        self._world = world
        self._tokens = rng.choice((9_000, 14_000, 40_000))
        self._folder = world.new_folder() if HAS_DISK and rng.random() < 0.4 else None
        self._use_model(rng.choice(("llama", "llama", "llama", WINDOWED, "qwen3")))
        # few of each in a trace, so that many requests have a key in common
        self._tenants = rng.choice(((b"a",), (b"a", b"a", b"b")))
        self._names = rng.choice(((None,), (None, "style"), ("style",), ("tone", "style")))
        self._whole_share = rng.choice((0.1, 0.3, 0.9))  # of requests
        self._layers = rng.choice(((None,), (None, None, None if self._name == WINDOWED else 1)))
        self._outcome = Outcome()
        self._core = self._new_core()
        self._asked: dict[Job, Asked] = {}
        self._read: list[Pass] = []
        self._is_storing = rng.random() < 0.5
        self._is_private = self._is_storing and rng.random() < 0.5
        self._num_stored, self._forgotten = 3, set[str]()
        first = self._ids(rng.randrange(280, 500))
        # a second document begins like the first one
        second = first[: rng.randrange(200, 280)] + self._ids(rng.randrange(100, 300))
        third = self._ids(rng.randrange(260, 400))
        self._texts = [Text(ids, number) for number, ids in enumerate((first, second, third))]
        self._stored = [f"document-{number}" for number in range(3)]  # its id at present

    def run(self, num_requests: int = 12) -> Outcome:
        rng = self._rng
        left, is_hurried = num_requests, rng.random() < 0.5
        while left or not self._core.is_idle:
            while left and rng.random() < (0.3 if is_hurried else 0.04):
                left -= 1
                self._ask()
            if rng.random() < 0.01:
                self._reload_adapter()
            if rng.random() < 0.01:
                self._cancel()
            if self._is_storing and rng.random() < 0.02:
                self._forget(rng.randrange(3))
            if self._folder is not None and rng.random() < 0.01:
                self._restart()
            if not self._core.is_idle:
                self._step()
        assert self._core.kv_bytes_used == 0, "memory is still held"
        if self._is_private:
            self._check_wiped()
        self._close()
        return self._outcome

    def _use_model(self, name: str) -> None:
        rng, world = self._rng, self._world
        self._name, self._model = name, world.model(name)
        self._versions = world.adapters(name)
        self._loaded = {name: rng.choice(listed) for name, listed in self._versions.items()}
        self._cold = world.cold(name, self._tokens)

    def _new_core(self) -> Core:
        share = self._rng.choice((0.4, 0.7, 1.0))
        return new_core(
            self._model,
            self._tokens,
            cache_memory=share,
            rng=self._rng,
            folder=self._folder,
        )

    def _close(self) -> None:
        counts = self._core.cache_counts
        self._outcome.hits += counts.hits
        self._outcome.evictions += counts.evictions
        if self._folder is not None:
            self._outcome.disk_hits += self._core._disk.counts.hits
            self._outcome.disk_segments += self._core._disk.counts.segments
            self._core.close()

    def _restart(self) -> None:
        """Go on with another engine, sometimes with other weights, or as after a sudden end."""
        assert self._folder is not None
        rng, after_end = self._rng, self._world.new_folder()
        if rng.random() < 0.5:  # what a process leaves that is killed at this moment
            copy_files(self._folder, after_end)
            self._folder, before = after_end, self._folder
        else:
            before = None
        self._close()
        if before is not None:
            shutil.rmtree(before)
        if rng.random() < 0.3:
            self._outcome.damaged += damage_file(self._folder, rng)
        self._outcome.cancelled += len(self._asked)
        self._asked.clear()
        if rng.random() < 0.3 and self._name in OTHER_WEIGHTS:
            self._use_model(OTHER_WEIGHTS[self._name])
        self._core = self._new_core()
        self._outcome.restarts += 1

    def _step(self) -> None:
        for job, event in self._core.step():
            asked = self._asked[job]
            asked.events.append(event)
            if isinstance(event, Filtered):
                self._check_hit(asked, event, job.sequence)
            elif isinstance(event, TextDelta) and job.sequence.is_whole:
                self._check_whole(asked, job)
            elif isinstance(event, Finished):
                del self._asked[job]
                self._check_answer(asked)
        self._core.check_integrity()
        assert self._forgotten.isdisjoint(self._core.stored_documents)

    def _check_hit(self, asked: Asked, event: Filtered, sequence: LiveSequence) -> None:
        """What a pass has left out must have been read by one of the same key before it."""
        self._check_cached(asked, event, sequence.tokens)

    def _check_cached(self, asked: Asked, event: Filtered, tokens: Any) -> None:
        report = event.report
        self._check_in_common(asked, asked.key, report.cached_tokens, tokens)
        self._outcome.left_out += report.cached_tokens
        if report.layer is not None:
            self._note_pass(asked, asked.key, tokens)

    def _check_whole(self, asked: Asked, job: Job) -> None:
        """The same when a prompt has been read whole, if only because its filter fell back."""
        if any(isinstance(event, TextDelta) for event in asked.events[:-1]):
            return
        sequence, key = job.sequence, (*asked.key[:-1], None)
        self._check_in_common(asked, key, sequence.num_reused, sequence.tokens)
        is_scored = asked.request.prompt_logprobs is not None
        assert sequence.num_reused < (1 if is_scored else len(sequence.tokens))
        self._outcome.whole_hits += sequence.num_reused > 0
        self._note_pass(asked, key, sequence.tokens)

    def _check_in_common(self, asked: Asked, key: Key, count: int, tokens: Any) -> None:
        passes = [one for one in self._read + asked.had if one.key == key]
        most = max((num_common(one.tokens, tokens) for one in passes), default=0)
        assert count <= most, f"{count} of {most} tokens in common"

    def _note_pass(self, asked: Asked, key: Key, tokens: Any) -> None:
        documents = frozenset(asked.request.documents)
        if documents.isdisjoint(self._forgotten):
            self._read.append(Pass(key, as_tokens(tokens), documents))

    def _check_answer(self, asked: Asked) -> None:
        expected = answer_of(list(self._cold.run_alone(replace(asked.request, pin=False))))
        found = answer_of(asked.events)
        assert found == expected, f"{asked.request}: {found}, a cold engine: {expected}"
        self._outcome.answers += 1
        history = Text([*asked.request.prompt_ids, *found[-1]], asked.number)
        if len(history.ids) < MOST_TOKENS - 200:
            self._texts.append(history)

    def _ask(self) -> None:
        rng = self._rng
        name = rng.choice(self._names)
        text = rng.choice(self._texts[:2] + self._texts)
        ids = text.ids + self._ids(rng.choice((8, 20, 40, 150)))
        adapter = None if name is None else self._loaded[name]
        request = self._request(ids, adapter)
        if self._is_private or (self._is_storing and rng.random() < 0.6):
            documents = (self._stored[text.number],)
            request = replace(request, documents=documents, pin=rng.random() < 0.3)
        try:
            job = self._core.add(request)
        except (CapacityExceeded, RequestError):  # it is too long, or too long to be pinned
            return
        of_adapter = None if adapter is None else (name, id(adapter))
        layer = job.sequence.filter_layer
        key = self._name, request.tenant, of_adapter, layer
        self._asked[job] = Asked(request, key, text.number)
        self._note_segments(job, key)

    def _note_segments(self, job: Job, key: Key) -> None:
        """Note the segments that a request may leave in the cache, if it reads any."""

    def _request(self, ids: list[int], adapter: Adapter | None) -> Request:
        rng = self._rng
        request = Request(
            request_id="r",
            prompt_ids=ids,
            sampling=SamplingParams(
                max_tokens=rng.choice((1, 4, 4, 20)),
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.randrange(99),
                ignore_eos=True,
            ),
            filter=FilterParams(
                method="sieve",
                keep=rng.choice((32, 48, 0.1, "auto")),
                layer=rng.choice(self._layers),
                fallback=rng.random() < 0.2,
                return_selection=True,
            ),
            question=rng.choice((((len(ids) - 6, len(ids)),),) * 4 + ((), ((2, 9),))),
            priority=rng.choice((0, 0, 1)),
            selects_only=rng.random() < 0.1,
            adapter=adapter,
            tenant=rng.choice(self._tenants),
        )
        if rng.random() < 0.2:
            others = ["snapkv"] * (self._name != WINDOWED)
            method: Any = rng.choice(["gemfilter", "none", "random", *others])
            params = FilterParams(method=method, keep=48, return_selection=True)
            request = replace(request, filter=params)
        if rng.random() < self._whole_share:
            params = FilterParams(method="none", keep=48, return_selection=True)
            scored = rng.choice((None,) * 9 + (0,))
            request = replace(request, filter=params, prompt_logprobs=scored)
        return request

    def _reload_adapter(self) -> None:
        """Requests under way keep the adapter that they began with."""
        name = self._rng.choice(list(self._versions))
        self._loaded[name] = self._rng.choice(self._versions[name])

    def _cancel(self) -> None:
        if not self._asked:
            return
        job = self._rng.choice(list(self._asked))
        del self._asked[job]
        ended = self._core.cancel(job)
        assert [event.reason for _, event in ended if isinstance(event, Finished)] == ["abort"]
        self._core.check_integrity()
        self._outcome.cancelled += 1

    def _forget(self, number: int) -> None:
        """Delete a stored document; its text may be stored again under another id."""
        name = self._stored[number]
        self._num_stored += 1
        self._stored[number] = f"document-{self._num_stored}"
        self._forgotten.add(name)
        self._core.forget_documents({name})
        gone = [one for one in self._read if name in one.documents]
        self._read = [one for one in self._read if name not in one.documents]
        for job, asked in self._asked.items():
            if job.sequence.span is not None:
                asked.had += gone
        self._outcome.forgotten += 1
        self._core.check_integrity()
        assert name not in self._core.stored_documents
        if self._folder is not None:
            held = [info for info in self._core._disk.folder.files if name in info.ids]
            assert not held, held

    def _check_wiped(self) -> None:
        """Every request was about a stored document: without these, nothing is left in memory."""
        for number in range(3):
            self._forget(number)
        assert self._core.cache_usage_ratio == 0.0
        assert not self._core._runner.memory.rows.any(), "something of a deleted document is left"
        if self._folder is not None:
            left = [path for path in self._folder.iterdir() if path.name.startswith("kv-")]
            assert not left, left
        self._outcome.wiped += 1

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, models.VOCAB) for _ in range(count)]


def run_traces(kind: type[Trace], world: World, seeds: range) -> Outcome:
    """What happened in the traces of all seeds together."""
    total = Outcome()
    for seed in seeds:
        try:
            outcome = kind(world, seed).run()
        except Exception as error:
            error.add_note(f"in the trace of seed {seed}")
            raise
        for name in Outcome.__slots__:
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        if seed % 50 == 49:
            print(f"{seed + 1 - seeds.start} traces: {total}", file=sys.stderr, flush=True)
    return total
