"""Random traces over an engine with a document cache, each answer compared with a cold engine's.

A trace is made from its seed alone: the engine's own clock is replaced, so that chunks, pauses and
decode steps are drawn as well. `World` has what all traces share: models and adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig
from gemserve.engine.core import Core
from gemserve.engine.document_cache import as_tokens, num_common
from gemserve.engine.job import Job
from gemserve.errors import CapacityExceeded
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.causal_model import CausalModel
from gemserve.types import (
    Event,
    Filtered,
    FilterParams,
    Finished,
    Request,
    SamplingParams,
    TextDelta,
)
from tests import adapters, models
from tests.cores import core_over
from tests.model.test_selection import NoText

UNIT = 2 * 16 * 4  # bytes of one token's keys in one layer of the tiny models
LAYER = 2
WINDOWED = "qwen2-window"
MOST_TOKENS = 1000  # of a prompt
Answer = tuple[Any, ...]
Key = tuple[Any, ...]


class World:
    """Tiny models, and adapters that were loaded one after the other under two names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, CausalModel] = {}
        self._adapters: dict[str, dict[str, list[Adapter]]] = {}
        self._cold: dict[tuple[str, int], Core] = {}

    def model(self, name: str) -> CausalModel:
        if name not in self._models:
            self._models[name] = CausalModel(models.build(name))
        return self._models[name]

    def adapters(self, model_name: str) -> dict[str, list[Adapter]]:
        """By name, the adapters that its folder has held. A reload takes another one of them."""
        if model_name not in self._adapters:
            third = "ntk" if model_name == WINDOWED else "prefix"  # which a window would lose
            kinds = {"style": ("ntk", "ntk", third), "tone": ("lora", "activation")}
            self._adapters[model_name] = {
                name: [self._load(model_name, name, kind, seed) for seed, kind in enumerate(listed)]
                for name, listed in kinds.items()
            }
        return self._adapters[model_name]

    def cold(self, model_name: str, tokens: int) -> Core:
        if (model_name, tokens) not in self._cold:
            core = new_core(self.model(model_name), tokens, cache_memory=0.0)
            self._cold[model_name, tokens] = core
        return self._cold[model_name, tokens]

    def _load(self, model_name: str, name: str, kind: str, seed: int) -> Adapter:
        model = self.model(model_name)
        folder = self._folder / f"{model_name}-{name}-{seed}"
        if kind == "lora":
            adapters.write_lora(folder, models.build(model_name), seed, target_modules=["k_proj"])
        else:
            adapters.write(folder, kind, model, seed)
        return load_adapter(name, folder, model, base_of(model), 1 << 24)


def new_core(model: CausalModel, tokens: int, *, cache_memory: float) -> Core:
    return core_over(
        model,
        NoText(),
        EngineConfig(
            filter_layer=LAYER,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_memory=cache_memory,
            min_chunk_tokens=32,
            max_chunk_tokens=400,
        ),
        frozenset(),
    )


class RandomPace:
    """Draws what the engine's pace measures, so that a seed alone decides about a trace."""

    def __init__(self, rng: Random, token_cost: float) -> None:
        self._rng, self._token_cost = rng, token_cost
        self._pauses = rng.choice((0.0, 0.1, 0.5))

    def is_decode_due(self) -> bool:
        return self._rng.random() < 0.5

    def slice_s(self, is_decoding: bool) -> float:
        """Either a pass pauses at every chance, or it does not pause."""
        return 0.0 if self._rng.random() < self._pauses else float("inf")

    def piece_cost(self, is_decoding: bool) -> float:
        return self._token_cost * self._rng.choice((1, 100, 200, 400))

    def observe_decode(self, seconds: float) -> None: ...

    def observe_slice(self, seconds: float) -> None: ...

    def observe_pass(self, seconds: float, cost: float) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What happened in a trace. `left_out`: tokens that passes took over from the cache."""

    answers: int = 0
    hits: int = 0
    evictions: int = 0
    cancelled: int = 0
    left_out: int = 0


@dataclass(slots=True)
class Asked:
    """A request in flight, and its events so far."""

    request: Request
    key: Key
    events: list[Event] = field(default_factory=list)


class Trace:
    """One random trace. `run` raises `AssertionError` at the first thing that is wrong."""

    def __init__(self, world: World, seed: int) -> None:
        self._rng = rng = Random(seed)
        names = ("llama", "llama", "llama", WINDOWED, "qwen3")
        self._name = rng.choice(names)
        self._tokens = rng.choice((9_000, 14_000, 40_000))
        self._model = world.model(self._name)
        self._versions = world.adapters(self._name)
        self._loaded = {name: rng.choice(listed) for name, listed in self._versions.items()}
        # few of each in a trace, so that many requests have a key in common
        self._tenants = rng.choice(((b"a",), (b"a", b"a", b"b")))
        self._names = rng.choice(((None,), (None, "style"), ("style",), ("tone", "style")))
        self._layers = rng.choice(((None,), (None, None, None if self._name == WINDOWED else 1)))
        self._cold = world.cold(self._name, self._tokens)
        self._core = self._new_core()
        self._outcome = Outcome()
        self._asked: dict[Job, Asked] = {}
        self._read: list[tuple[Key, Any]] = []  # what filter passes have read to their end
        first = self._ids(rng.randrange(280, 500))
        # a second document begins like the first one
        second = first[: rng.randrange(200, 280)] + self._ids(rng.randrange(100, 300))
        self._texts = [first, second, self._ids(rng.randrange(260, 400))]

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
            if not self._core.is_idle:
                self._step()
        counts = self._core.cache_counts
        self._outcome.hits += counts.hits
        self._outcome.evictions += counts.evictions
        assert self._core.kv_bytes_used == 0, "memory is still held"
        return self._outcome

    def _new_core(self) -> Core:
        core = new_core(self._model, self._tokens, cache_memory=self._rng.choice((0.4, 0.7, 1.0)))
        core._pace = RandomPace(self._rng, self._model.shape.layer(0, 1))  # type: ignore[assignment]
        return core

    def _step(self) -> None:
        for job, event in self._core.step():
            asked = self._asked[job]
            asked.events.append(event)
            if isinstance(event, Filtered):
                self._check_hit(asked, event, job.sequence.tokens)
            elif isinstance(event, Finished):
                del self._asked[job]
                self._check_answer(asked)
        self._core.check_integrity()

    def _check_hit(self, asked: Asked, event: Filtered, tokens: Any) -> None:
        """What a pass has left out must have been read by one of the same key before it."""
        report = event.report
        common = [num_common(theirs, tokens) for key, theirs in self._read if key == asked.key]
        most = max(common, default=0)
        assert report.cached_tokens <= most, f"{report.cached_tokens} of {most} tokens in common"
        self._outcome.left_out += report.cached_tokens
        if report.layer is not None:
            self._read.append((asked.key, as_tokens(tokens)))

    def _check_answer(self, asked: Asked) -> None:
        expected = answer_of(list(self._cold.run_alone(asked.request)))
        found = answer_of(asked.events)
        assert found == expected, f"{asked.request}: {found}, a cold engine: {expected}"
        self._outcome.answers += 1
        history = [*asked.request.prompt_ids, *found[-1]]
        if len(history) < MOST_TOKENS - 200:
            self._texts.append(history)

    def _ask(self) -> None:
        rng = self._rng
        name = rng.choice(self._names)
        ids = rng.choice(self._texts[:2] + self._texts) + self._ids(rng.choice((8, 20, 40, 150)))
        adapter = None if name is None else self._loaded[name]
        request = self._request(ids, adapter)
        try:
            job = self._core.add(request)
        except CapacityExceeded:
            return
        of_adapter = None if adapter is None else (name, id(adapter))
        layer = job.sequence.filter_layer
        self._asked[job] = Asked(request, (self._name, request.tenant, of_adapter, layer))

    def _request(self, ids: list[int], adapter: Adapter | None) -> Request:
        rng = self._rng
        request = Request(
            request_id="r",
            prompt_ids=ids,
            sampling=SamplingParams(
                max_tokens=rng.choice((1, 4)),
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

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(3, models.VOCAB) for _ in range(count)]


def answer_of(events: list[Event]) -> Answer:
    """What must not depend on a cache: what was kept and why, and the tokens of the answer."""
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason != "error", last.error
    tokens = [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]
    return report.reason, report.kept_tokens, report.selection, last.reason, tuple(tokens)
