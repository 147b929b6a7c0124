"""Replayed decode steps against those run one by one, with a recorder that runs them again.

What a CUDA graph would replay is the same function over the same buffers; only a GPU can tell
whether it can be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.events import TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.model.adapter import Adapter
from gemserve.model.passes import graphs
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.graphs import DecodeGraphs, build_graphs
from gemserve.model.passes.kv import DecodeBatch, KVSpan, Memory
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText, random_ids

CAPACITY = 160
NAMES = ("llama", "mistral-window", "opt", "qwen3")


class Rerun:
    """A recorder that keeps the step itself."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        step()  # as recording may
        return step


class Streams:
    """Sequences that decode, in two memories: by graphs in one, step by step in the other."""

    def __init__(self, name: str, count: int, most: int = 4) -> None:
        self.model = CausalModel(models.build(name))
        self.units = 2 * self.model.num_layers * CAPACITY
        self.memories = [self.model.new_memory(self.units * count) for _ in range(2)]
        for memory in self.memories:  # what was never written is not what a step may read
            memory.rows.fill_(math.nan)
        self.recorder = Rerun()
        self.graphs = DecodeGraphs(self.model, self.memories[0], self.recorder, most=most)
        self.lengths = [0] * count

    def kv(self, memory: Memory, index: int) -> KVSpan:
        layers = self.model.num_layers
        return memory.kv(index * self.units, num_layers=layers, capacity=CAPACITY)

    def read(self, index: int, length: int) -> None:
        """A prompt."""
        for memory in self.memories:
            self.model.prefill_chunk(
                random_ids(length, index),
                start=0,
                kv=self.kv(memory, index),
                rope_tokens=CAPACITY,
                is_last=False,
            )
        self.lengths[index] = length

    def batch(self, memory: Memory, indices: Sequence[int]) -> DecodeBatch:
        slots = [self.lengths[index] for index in indices]
        spans = [self.kv(memory, index) for index in indices]
        return DecodeBatch(memory, spans, slots=slots, positions=slots)

    def step(self, *indices: int) -> None:
        """One token of each; logits and memories must agree, and nothing else may change."""
        ids = random_ids(len(indices), sum(self.lengths))
        before = self.memories[0].rows.clone()
        assert self.graphs.takes(len(ids))
        ours = self.graphs.decode(ids, self.batch(self.memories[0], indices))
        theirs = self.model.decode(
            ids, self.batch(self.memories[1], indices), [CAPACITY] * len(ids)
        )
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
        after, other = (memory.rows for memory in self.memories)
        torch.testing.assert_close(after, other, atol=1e-4, rtol=1e-4, equal_nan=True)
        is_new = (before.nan_to_num(7e7) != after.nan_to_num(7e7)).any(dim=-1)
        heads = self.model.shape.num_kv_heads
        assert int(is_new.sum()) == len(ids) * 2 * self.model.num_layers * heads
        for index in indices:
            self.lengths[index] += 1


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_equal_those_run_one_by_one(name: str) -> None:
    """While sequences join, leave and change places; windows, and heads of one group, too."""
    streams = Streams(name, 4)
    for index, length in enumerate((130, 1, 40, 99)):
        streams.read(index, length)
    for indices in ((0,), (0, 1), (1, 0), (2, 1, 0), (0, 1, 2, 3), (3,), (1, 3), (3, 2, 0)):
        streams.step(*indices)
    assert streams.recorder.num_recorded == 3  # for 1, 2 and up to 4 sequences


def test_sizes_differ_in_their_longest_sequence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_LEAST_LENGTH", 32)
    streams = Streams("llama", 2)
    streams.read(0, 30)
    streams.read(1, 63)
    seen: list[int] = []
    step_logits = streams.model.step_logits

    def noted(step: Any, *rest: Any) -> torch.Tensor:
        seen.append(step.spans.longest)
        assert int(step.spans.table[:, 4].max()) <= step.spans.longest
        return step_logits(step, *rest)

    monkeypatch.setattr(streams.model, "step_logits", noted)
    for indices in ((0,), (0,), (0,), (1, 0), (1,), (1,)):
        streams.step(*indices)
    assert streams.recorder.num_recorded == 4  # (1, 32), (1, 64), (2, 64), (1, 128)
    assert set(seen) >= {32, 64, 128}


def test_a_step_is_transferred_at_once_and_left_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams("llama", 3)
    for index in range(3):
        streams.read(index, 20)
    places = {streams.graphs._numbers.data_ptr(), streams.graphs._logits.data_ptr()}
    sent: list[int] = []
    staged = graphs.on_host

    def counted(values: Any, *rest: Any) -> torch.Tensor:
        sent.append(len(values))
        return staged(values, *rest)

    monkeypatch.setattr(graphs, "on_host", counted)
    for indices in ((0, 1, 2), (1,)):
        streams.step(*indices)
    assert sent == [4 * 7, 7]
    assert places == {streams.graphs._numbers.data_ptr(), streams.graphs._logits.data_ptr()}


def test_what_cannot_be_recorded_is_run_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Some models ask the device for numbers on their way, experts' for example."""
    calls: list[int] = []

    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        calls.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    core, tokens = run_together("llama", refuse, 4)
    assert tokens == run_together("llama", None, 4)[1]
    assert len(calls) == 1
    assert "cannot be recorded" in caplog.text
    assert not core._runner._graphs.takes(1)  # type: ignore[union-attr]


def test_sequences_tried_alone_do_not_share_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays leave them in one place, where the next one's would be read for all."""
    decode = DecodeGraphs.decode

    def failing(self: DecodeGraphs, ids: Sequence[int], batch: DecodeBatch) -> torch.Tensor:
        if len(ids) > 1:
            raise RuntimeError("out of memory")
        return decode(self, ids, batch)

    monkeypatch.setattr(DecodeGraphs, "decode", failing)
    assert run_together("llama", Rerun(), 8)[1] == run_together("llama", None, 8)[1]


def run_together(
    name: str, record: Any, most: int, adapters: Sequence[Adapter | None] = (None,) * 6
) -> tuple[Core, list[list[int]]]:
    """Six requests that end at different times; their tokens. `record` None: without graphs."""
    model = CausalModel(models.build(name))
    config = EngineConfig(kv_memory_bytes=8 << 20, filter_min_tokens=4096, filter_layer=2)
    core = core_over(model, NoText(), config, eos_ids=frozenset())
    assert not core.has_graphs
    if record is not None:
        runner = core._runner
        runner._graphs = DecodeGraphs(model, runner.memory, record, most=most)
    tokens: dict[Any, list[int]] = {}
    for index, adapter in enumerate(adapters):
        sampling = SamplingParams(
            max_tokens=3 + 4 * index, temperature=0.8 * (index % 2), seed=index
        )
        job = core.add(
            Request(
                request_id=str(index),
                prompt_ids=random_ids(20 + 17 * index, index),
                sampling=sampling,
                filter=FilterParams(method="none", keep=16),
                adapter=adapter,
            )
        )
        tokens[job] = []
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                tokens[job] += event.token_ids
    assert [len(drawn) for drawn in tokens.values()] == [3 + 4 * i for i in range(len(adapters))]
    return core, list(tokens.values())


@pytest.mark.parametrize("most", [1, 4, 8])
def test_an_engine_with_graphs_says_what_one_without_says(most: int) -> None:
    """With `most` below the number of streams, larger batches are run as before."""
    recorder = Rerun()
    assert run_together("llama", recorder, most)[1] == run_together("llama", None, most)[1]
    assert recorder.num_recorded == {1: 1, 4: 3, 8: 4}[most]


def test_a_batch_with_an_adapter_is_not_replayed() -> None:
    class Shift(Adapter):
        def shift(self, layer: int) -> torch.Tensor | None:
            return torch.full((64,), 0.5) if layer == 1 else None

    adapters = (None, None, Shift("a", "1"), None, None, None)
    recorder = Rerun()
    ours = run_together("llama", recorder, 8, adapters)[1]
    assert ours == run_together("llama", None, 8, adapters)[1]
    assert ours != run_together("llama", None, 8)[1]
    assert recorder.num_recorded > 0  # once it has ended


def test_graphs_are_refused_where_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(models.build("llama"))
    memory = model.new_memory(8)
    assert build_graphs(model, memory, "auto") is None
    assert build_graphs(model, memory, "off") is None
    with pytest.raises(ConfigError, match="cuda_graphs=on: the model is on cpu, and only a CUDA"):
        build_graphs(model, memory, "on")
    model.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="cuda_graphs=on: attention backend 'aten-cpu' decodes"):
        build_graphs(model, memory, "on")
    monkeypatch.setattr(type(model.backend), "is_recordable", True)
    scaled = CausalModel(models.build("phi3-longrope"))
    scaled.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="rotary embedding depends on each sequence's length"):
        build_graphs(scaled, memory, "on")
    assert build_graphs(scaled, memory, "auto") is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_cuda_graphs_equal_steps_run_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = models.build
    monkeypatch.setattr(models, "build", lambda given: build(given).cuda())
    streams = Streams(name, 4)
    made = build_graphs(streams.model, streams.memories[0], "on")
    assert made is not None
    streams.graphs = made
    for index, length in enumerate((130, 1, 40, 99)):
        streams.read(index, length)
    for indices in ((0,), (0, 1), (2, 1, 0), (0, 1, 2, 3), (3,), (1, 3), (3, 2, 0)):
        streams.step(*indices)
