"""The filter pass in FP8, by the plain form of its products: what changes, and what must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.calibration.files import Calibration
from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import EngineConfig, ModelConfig, resolve_engine
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.engine.build import assemble, build_core, with_fp8_filter
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.filtering.sieve import Sieve
from gemserve.model.loading.loader import LoadedModel, load
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.fp8 import FP8Linear, check_device, check_sizes, fp8_bytes, fp8_layers
from gemserve_kernels.fp8 import reference_scaled_product
from gemserve_lab.run import generate
from gemserve_lab.tasks.needle import SUBTASKS
from tests import adapters, models
from tests.cores import core_over
from tests.model.test_adapters import prompt, request, run
from tests.model.test_selection import NoText

LAYER = 2
CONFIG = EngineConfig(kv_memory_bytes=24 << 20, filter_min_tokens=64, filter_layer=LAYER)
SIEVE = FilterParams(method="sieve", keep=48, return_selection=True)


def core_of(model: CausalModel) -> Core:
    return core_over(model, NoText(), CONFIG, eos_ids=frozenset())


def fp8(model: CausalModel) -> CausalModel:
    return with_fp8_filter(model, CONFIG, reference_scaled_product)


def kept(core: Core, one: Request) -> list[int]:
    (report,) = [e.report for e in core.run_alone(one) if isinstance(e, Filtered)]
    assert report.selection is not None
    return [p for start, stop in report.selection for p in range(start, stop)]


def is_filled(positions: list[int]) -> bool:
    """Do they have no room for another passage of this budget?"""
    return 48 - Sieve().passage_limit(48) < len(positions) <= 48


def matrices(layers: Any) -> set[str]:
    return {name for name, m in layers.named_modules() if isinstance(m, FP8Linear)}


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_lower_layers_get_copies_and_the_model_stays(name: str) -> None:
    model = CausalModel(models.build(name))
    before = [type(m) for m in model.hf.modules()]
    copied = fp8_layers(model.lower_layers(LAYER), reference_scaled_product)
    assert [type(m) for m in model.hf.modules()] == before
    linears = {
        n for n, m in nn.ModuleList(model.lower_layers(1)).named_modules() if type(m) is nn.Linear
    }
    qkv = {f"2.self_attn.{p}_proj" for p in (["qkv"] if name.startswith("phi3") else "qkv")}
    assert matrices(copied) == linears | qkv
    ours = [m for m in copied.modules() if isinstance(m, FP8Linear)]
    assert fp8_bytes(model.lower_layers(LAYER)) == sum(
        m.values.nbytes + m.scales.nbytes for m in ours
    )


def test_a_matrix_comes_out_close_and_with_its_bias() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 64)
    states = torch.randn(2, 5, 96)
    with torch.no_grad():
        expected = linear(states)
        actual = FP8Linear(linear, reference_scaled_product)(states)
    assert actual.shape == expected.shape
    assert float((actual - expected).norm() / expected.norm()) < 0.06


def test_what_is_kept_is_nearly_the_same_and_the_answer_is_the_models_own() -> None:
    """With nothing filtered not a bit may differ: generation has the original weights."""
    plain = CausalModel(models.build("llama", scale=1.5))
    ours, theirs = core_of(fp8(plain)), core_of(plain)
    asked = [request(prompt(400, seed=seed), None, params=SIEVE) for seed in range(8)]
    both = [(kept(ours, one), kept(theirs, one)) for one in asked]
    # a passage that loses a near tie goes as a whole, so one prompt alone tells little
    shared = sum(len(set(a) & set(b)) for a, b in both)
    assert shared >= 0.9 * sum(len(b) for _, b in both)
    assert all(is_filled(one) for a, b in both for one in (a, b))
    assert any(a != b for a, b in both), "a model this wild must show that its pass is another"
    whole = request(prompt(200), None)
    assert run(ours, [whole]) == run(theirs, [whole])


def test_a_request_may_filter_at_a_lower_layer() -> None:
    plain = CausalModel(models.build("llama", scale=1.5))
    one = request(prompt(300), None, params=replace(SIEVE, layer=1))
    assert is_filled(kept(core_of(fp8(plain)), one))


def test_the_built_in_model_finds_what_it_found() -> None:
    loaded = load(ModelConfig(device="cpu"))
    config = EngineConfig(kv_memory_bytes=64 << 20, filter_min_tokens=0)
    theirs = assemble(loaded, config)
    model = with_fp8_filter(loaded.model, theirs.config, reference_scaled_product)
    ours = core_over(model, loaded.tokenizer, theirs.config, loaded.eos_ids, theirs.calibration)
    shared = total = 0
    params = FilterParams(method="sieve", keep=128, return_selection=True)
    for index in range(4):
        draw = ExampleDraw(seed=3, num_tokens=1024, index=index, samples=4)
        example = SUBTASKS["single"](loaded.tokenizer, draw)
        made = [generate(core, example, example.prompt.ids, params) for core in (ours, theirs)]
        assert made[0][0] == made[1][0]
        sets = []
        for _, report in made:
            assert report.selection is not None
            sets.append({p for start, stop in report.selection for p in range(start, stop)})
        shared, total = shared + len(sets[0] & sets[1]), total + len(sets[1])
    assert shared >= 0.9 * total


def test_chunks_choose_as_the_whole_does() -> None:
    """Scales are a token's own: what else is in its chunk must not matter."""
    model = fp8(CausalModel(models.build("llama", scale=1.5)))
    one = request(prompt(500), None, params=SIEVE)
    sliced = replace(CONFIG, min_chunk_tokens=7, max_chunk_tokens=7)
    assert kept(core_over(model, NoText(), sliced, frozenset()), one) == kept(core_of(model), one)


@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation"])
def test_adapters_work_on_top(tmp_path: Path, kind: str) -> None:
    plain = CausalModel(models.build("llama", scale=1.5))
    store = AdapterStore(plain, tmp_path, 1 << 20)
    adapters.write(tmp_path / kind, kind, plain)
    store.load(kind, kind)
    one = request(prompt(400), store.get(kind), params=SIEVE)
    bare = kept(core_of(fp8(plain)), request(prompt(400), None, params=SIEVE))
    expected = kept(core_of(plain), one)
    actual = kept(core_of(fp8(plain)), one)
    # random weights choose among near equals; left out, the adapter would show
    assert len(set(actual) & set(expected)) >= 32
    assert len(set(actual) & set(expected)) > len(set(actual) & set(bare))


def test_a_lora_filters_in_its_own_precision(tmp_path: Path) -> None:
    """Its modules are over the original weights: exactly as on a server without FP8."""
    adapters.write_peft(tmp_path / "l", models.build("llama"), "lora")
    seen = []
    for make in (fp8, lambda model: model):
        model = make(CausalModel(models.build("llama")))
        store = AdapterStore(model, tmp_path, 1 << 20)
        store.load("l", "l")
        seen.append(kept(core_of(model), request(prompt(400), store.get("l"), params=SIEVE)))
    assert seen[0] == seen[1]


def test_where_there_are_no_such_products_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineConfig(filter_precision="fp8", kv_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="filter_precision=fp8, device cpu: needs an NVIDIA GPU"):
        # before the model is looked for
        build_core(ModelConfig(model="/nowhere", device="cpu"), engine)
    loaded = LoadedModel(
        model=CausalModel(models.build("llama")),
        tokenizer=None,
        eos_ids=frozenset(),
        source="/nowhere",
        name="/nowhere",
    )
    with pytest.raises(ConfigError, match="filter_precision=fp8, device cpu"):
        assemble(loaded, engine)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"compute capability is 8\.9, must be 9\.0"):
        check_device(torch.device("cuda"))


def test_sizes_that_the_hardware_refuses_are_named() -> None:
    layer = nn.Sequential(nn.Linear(32, 24))
    with pytest.raises(ConfigError, match="layer 0, 0 has 32 inputs and 24 outputs; both must be"):
        check_sizes([layer])
    check_sizes(CausalModel(models.build("llama")).lower_layers(LAYER))


def test_resolving_keeps_it() -> None:
    resolved = resolve_engine(
        EngineConfig(filter_precision="fp8"),
        Calibration(layer=1),
        is_adaptive=True,
        num_layers=4,
        context_tokens=100,
    )
    assert resolved.filter_precision == "fp8"
