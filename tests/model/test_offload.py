"""Upper layers on the host: the same tokens, whatever interleaves, and never more on the device.

Host and device are both the CPU here: the same code, with plain copies.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.config import EngineConfig, ModelConfig, find_offload_layers
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble, build_core, planned_weights
from gemserve.engine.core import Core
from gemserve.engine.running.passes import Pass, device_queue
from gemserve.errors import ConfigError
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.loading.loader import load, place
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.offload import HostLayers, Visiting
from tests import adapters, models
from tests.cores import core_over
from tests.model.test_adapters import prompt, request, run
from tests.model.test_selection import NoText
from tests.unit.test_passes import answers

MIB = 1 << 20
CPU = torch.device("cpu")
METHODS = ("none", "gemfilter", "sieve", "snapkv", "position", "random")


def offloaded(name: str = "llama", count: int = 3) -> CausalModel:
    return place(models.build(name), CPU, count)


def core_of(model: CausalModel, **settings: Any) -> Core:
    given = {"kv_memory_bytes": 64 * MIB, "filter_min_tokens": 0, "filter_layer": 0, **settings}
    config = EngineConfig(**given)
    return core_over(model, NoText(), config, eos_ids=frozenset())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*models.ARCHITECTURES, "llama-dynamic"])
def test_logits_are_those_of_the_model_at_hand(name: str, count: int) -> None:
    ids = prompt(80)
    seen = []
    for model in (CausalModel(models.build(name)), offloaded(name, count)):
        memory = model.new_memory(2 * model.num_layers * 80)
        kv = memory.kv(0, num_layers=model.num_layers, capacity=80)
        seen.append(
            [
                model.prefill_chunk(ids[:30], start=0, kv=kv, rope_tokens=80, is_last=True),
                model.prefill_chunk(ids[30:], start=30, kv=kv, rope_tokens=80, is_last=True),
            ]
        )
    for expected, actual in zip(*seen, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)
    check_servable(offloaded(name, count))


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=str(i),
            prompt_ids=[rng.randrange(6, models.VOCAB) for _ in range(rng.randrange(100, 700))],
            sampling=SamplingParams(max_tokens=rng.randrange(1, 12), temperature=0.0),
            filter=FilterParams(method=rng.choice(METHODS), keep=80),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3])
def test_passes_that_pause_in_the_middle_of_layers(count: int) -> None:
    """Several prompts and streams take turns in two places: each must find its own layer there."""
    asked = requests(12)
    plain = core_of(CausalModel(models.build("llama")), step_target_s=60.0)
    expected = {r.request_id: answers(plain, [r])[r.request_id] for r in asked}
    # room for a few at a time; every break is taken
    sliced = core_of(
        offloaded(count=count), kv_memory_bytes=2 * MIB, step_target_s=1e-9, min_chunk_tokens=64
    )
    assert answers(sliced, asked) == expected
    assert not sliced._runner._states


@pytest.mark.parametrize("does_return", [True, False])
def test_who_goes_on_finds_its_layer_again(
    does_return: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, on purpose: two passes stop in every layer, and decode over each other."""
    if not does_return:
        monkeypatch.setattr(Visiting, "_pause", lambda self, pause: pause())
    model = offloaded(count=3)
    ids = [prompt(60, seed=i) for i in range(2)]
    memory = model.new_memory(2 * 2 * model.num_layers * 60)
    spans = [
        memory.kv(2 * i * model.num_layers * 60, num_layers=model.num_layers, capacity=60)
        for i in range(2)
    ]

    def forward(i: int, **more: Any) -> torch.Tensor | None:
        return model.prefill_chunk(
            ids[i], start=0, kv=spans[i], rope_tokens=60, is_last=True, **more
        )

    expected = [forward(i) for i in range(2)]
    at_once = device_queue(torch.device("cpu"))
    passes = [
        Pass(lambda breaks, i=i: forward(i, breaks=breaks), 1 << 20, at_once) for i in range(2)
    ]
    with torch.inference_mode():
        passes[0].run(0.0)
        passes[0].run(0.0)  # a layer ahead of the other
        done = [False, False]
        while not all(done):
            for i, one in enumerate(passes):
                done[i] = done[i] or one.run(0.0)
    same = [torch.equal(one.result, want) for one, want in zip(passes, expected, strict=True)]  # type: ignore[arg-type]
    assert all(same) == does_return


def test_never_more_on_the_device_than_was_planned(tmp_path: Path) -> None:
    """Lower layers, embeddings and head, and two places; a filter pass copies nothing."""
    loaded = load(ModelConfig(model=str(models.save("llama", tmp_path)), device="cpu"), 3)
    config = EngineConfig(filter_layer=0, offload_layers=3, kv_memory_bytes=MIB)
    core = assemble(loaded, config)
    model, plan = core.model, planned_weights(core.model, core.config)
    assert model._host is not None
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _weights(model)}
    resting = sum(w.nbytes for w in model._host._resting.values())
    places = sum(p.nbytes for p in model._host._places)
    # each weight begins at a multiple of 256 bytes
    assert plan.places <= places <= plan.places * 1.02
    assert plan.host <= resting <= plan.host * 1.02
    # what `bind` has left of the host's own weights is what nothing runs
    assert sum(held.values()) == plan.resident + places
    total = sum(p.nbytes for p in model.hf.parameters())
    assert plan.resident + plan.host == total


def _weights(model: CausalModel) -> list[torch.Tensor]:
    """All that a pass through `runnable` reads."""
    return list(model.runnable().parameters())


def test_a_filter_pass_copies_nothing_and_a_token_each_layer_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    copy = HostLayers._copy

    def spy(self: HostLayers, layer: int, index: int) -> None:
        copied.append(layer)
        copy(self, layer, index)

    monkeypatch.setattr(HostLayers, "_copy", spy)
    model = place(models.build("llama"), CPU, 3)
    core = core_of(model)
    only = Request(
        request_id="r",
        prompt_ids=prompt(300),
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
        filter=FilterParams(method="sieve", keep=64),
    )
    events = core.run_alone(only)
    assert isinstance(next(events), Filtered)
    at_filter = len(copied)
    assert isinstance(list(events)[-1], Finished)
    assert at_filter == 0
    # the kept prompt and three more tokens; of layers 1, 2, 3 the second has a place of its own
    assert copied == [1, 2, 3, *(1, 3) * 3]


def test_a_pass_that_is_given_up_leaves_nothing_behind() -> None:
    asked = requests(6, seed=1)
    plain = core_of(CausalModel(models.build("llama")))
    expected = answers(plain, asked[1:])
    core = core_of(offloaded(), step_target_s=1e-9, min_chunk_tokens=64)
    for steps in (1, 3, 5, 9):
        job = core.add(
            Request(
                request_id="gone",
                prompt_ids=prompt(500),
                sampling=SamplingParams(max_tokens=4, temperature=0.0),
                filter=FilterParams(method="none", keep=16),
            )
        )
        for _ in range(steps):
            core.step()
        core.cancel(job)
        while not core.is_idle:
            core.step()
    assert core.kv_usage_ratio == 0
    assert answers(core, asked[1:]) == expected


def test_a_copy_that_fails_is_not_taken_for_the_layer() -> None:
    model = offloaded()
    core = core_of(model)
    one = request(prompt(90), None)
    expected = run(core, [one])
    host = model._host
    assert host is not None
    weights = host._resting[1]
    host._resting[1] = weights[:-1].expand(2, -1)  # of no shape that fits
    (*_, end) = core.run_alone(one)
    assert isinstance(end, Finished)
    assert end.reason == "error"
    host._resting[1] = weights
    assert run(core, [one]) == expected


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_of_every_kind_beside_each_other(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A LoRA's tree is another one over weights that rest in the same place."""
    seen = []
    for model in (CausalModel(models.build("llama")), offloaded()):
        root = tmp_path / str(model.num_host_layers)
        for kind in ("ntk", "prefix", "activation"):
            adapters.write(root / kind, kind, model)
        targets = ["q_proj", "o_proj", "down_proj"]
        adapters.write_lora(
            root / "lora", models.build("llama"), target_modules=targets, **settings
        )
        store = AdapterStore(model, root, 16 * MIB)
        names = [None, "ntk", "prefix", "activation", "lora"]
        for name in names[1:]:
            assert name is not None
            store.load(name, name)
        asked = [
            request(
                prompt(150 + 7 * i, seed=i),
                None if name is None else store.get(name),
                params=FilterParams(method=method, keep=48),
                name=f"{i} {method}",
            )
            for i, name in enumerate(names)
            for method in ("none", "sieve")
        ]
        core = core_of(model, step_target_s=1e-9, min_chunk_tokens=64)
        seen.append(run(core, asked))
    assert seen[0] == seen[1]


def test_weights_stay_those_of_the_checkpoint() -> None:
    model = offloaded()
    core = core_of(model)
    answers(core, requests(3))
    expected = models.build("llama").state_dict()
    actual = model.hf.state_dict()
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, actual[name]), name


def test_layers_that_filter_cannot_be_away_and_two_save_nothing() -> None:
    assert find_offload_layers("auto", 32, 13) == 18
    assert find_offload_layers(18, 32, 13) == 18
    assert find_offload_layers(0, 32, 31) == 0
    for given, layer in ((19, 13), (1, 13), (2, 13), ("auto", 30), (1, 31)):
        with pytest.raises(ConfigError, match=f"offload_layers={given}: must be 0"):
            find_offload_layers(given, 32, layer)


def test_without_a_device_of_its_own_it_is_refused() -> None:
    engine = EngineConfig(offload_layers="auto", kv_memory_bytes=MIB)
    with pytest.raises(ConfigError, match="offload_layers=auto, device cpu: its memory is"):
        build_core(ModelConfig(device="cpu"), engine)


@pytest.mark.gpu
def test_on_a_gpu_the_tokens_are_the_same() -> None:
    asked = requests(6, seed=2)
    cuda = torch.device("cuda")
    plain = core_of(place(models.build("llama"), cuda, 0))
    expected = {r.request_id: answers(plain, [r])[r.request_id] for r in asked}
    before = torch.cuda.memory_allocated()
    model = place(models.build("llama"), cuda, 3)
    assert torch.cuda.memory_allocated() - before < sum(p.nbytes for p in model.hf.parameters())
    sliced = core_of(model, step_target_s=1e-9, min_chunk_tokens=64)
    assert answers(sliced, asked) == expected
