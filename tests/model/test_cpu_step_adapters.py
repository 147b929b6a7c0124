"""Rows with adapters in the compiled decode step: alone, beside each other, and what it refuses."""

from __future__ import annotations

import copy
import gc
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.adapters.kinds import load_adapter
from gemserve.model.adapter import NO_ADAPTER, Adapter, StepTerms
from gemserve.model.base_model import base_of
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.compiled_step import compiled_step, needs_compiler
from tests.cores import core_over
from tests.model.test_adapters import CONFIG, prompt, request, run
from tests.model.test_cpu_step_models import build
from tests.model.test_selection import NoText
from tests.step_prompts import Prompts, half_model, needs_bfloat16

pytestmark = needs_compiler
KINDS = ("ntk", "prefix", "activation", "lora")
ALL_MODULES = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
]


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def make(folder: Path, kind: str, model: CausalModel, seed: int = 0, **lora: Any) -> Adapter:
    """A random adapter, loaded as the server loads it."""
    path = folder / f"{kind}-{seed}-{len(list(folder.iterdir()))}"
    if kind == "lora":
        settings = {"target_modules": ALL_MODULES, **lora}
        adapters.write_lora(path, another(model), seed, **settings)
    else:
        adapters.write(path, kind, model, seed)
    return load_adapter(f"{kind}{seed}", path, model, base_of(model), 1 << 30)


def another(model: CausalModel) -> Any:
    """A model of the same sizes: PEFT changes the one that it is given."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    return type(model.hf)(config)


def step_of(name: str) -> tuple[CausalModel, CausalModel]:
    model = CausalModel(models.build(name))
    return model, with_cpu_step(model, "on")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3-longrope"])
def test_each_kind_is_what_the_layers_compute(name: str, kind: str, tmp_path: Path) -> None:
    model, stepping = step_of(name)
    fused = {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]} if "phi3" in name else {}
    adapter = make(tmp_path, kind, stepping, **fused)
    assert stepping.steps(adapter)
    prompts = Prompts(model, [1, 40, 600], [adapter] * 3)
    expected, stored = prompts.by_layers(), prompts.written(1)
    plain = Prompts(model, [1, 40, 600]).decode(stepping)
    assert not torch.allclose(plain, expected, atol=0.05)  # the adapter matters
    torch.testing.assert_close(prompts.decode(stepping), expected, atol=1e-3, rtol=5e-4)
    torch.testing.assert_close(prompts.written(1), stored, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["ntk", "activation", "lora"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_models_with_windows_and_sinks_have_them_too(
    family: str, kind: str, tmp_path: Path
) -> None:
    """But not prefixes, which a window would lose."""
    model = build(family)
    stepping = with_cpu_step(model, "on")
    adapter = make(tmp_path, kind, stepping, target_modules=["q_proj", "o_proj"])
    assert stepping.steps(adapter)
    prompts = Prompts(model, [1, 40, 600], [adapter, NO_ADAPTER, adapter])
    expected = prompts.by_layers()
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        prompts.decode(stepping) / scale, expected / scale, atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=needs_bfloat16)])
def test_mixed_rows_get_what_each_gets_alone(is_half: bool, tmp_path: Path) -> None:
    """Bit for bit: rows without adapters, of all kinds, of the same kind, and of one adapter."""
    model = half_model() if is_half else CausalModel(models.build("llama"))
    stepping = with_cpu_step(model, "on")
    some = [make(tmp_path, kind, stepping, seed) for kind in KINDS for seed in (0, 1)]
    rows = [NO_ADAPTER, *some, *reversed(some), NO_ADAPTER]
    prompts = Prompts(model, [3 + 37 * index % 90 for index in range(len(rows))], rows)
    together = prompts.decode(stepping)
    for index in range(len(rows)):
        assert torch.equal(prompts.decode(stepping, [index])[0], together[index])
    if not is_half:
        torch.testing.assert_close(together, prompts.by_layers(), atol=1e-3, rtol=5e-4)


@needs_bfloat16
@pytest.mark.parametrize("kind", KINDS)
def test_packed_bfloat16_models_have_them_too(kind: str, tmp_path: Path) -> None:
    model = half_model()
    stepping = with_cpu_step(model, "on")
    adapter = make(tmp_path, kind, stepping)
    assert stepping.steps(adapter)
    prompts = Prompts(model, [3, 40, 700], [adapter] * 3)
    expected = prompts.by_layers()
    error = (prompts.decode(stepping) - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.1  # the layers round more often


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_the_layers(kind: str, tmp_path: Path) -> None:
    model, stepping = step_of("llama")
    adapter = make(tmp_path, kind, stepping)
    prompts = Prompts(model, [20, 150], [adapter] * 2)
    for index in range(2):
        expected = prompts.greedy(prompts.layers_of(index), index, 24)
        assert prompts.greedy(stepping, index, 24) == expected


def test_long_prefixes_are_read_in_parts(tmp_path: Path) -> None:
    model, stepping = step_of("llama")
    made, _ = adapters.tensors("prefix", model)
    long = {name: tensor.repeat(1, 1, 100, 1) for name, tensor in made.items()}
    path = adapters.write(tmp_path / "long", "prefix", model, made=long)
    adapter = load_adapter("long", path, stepping, base_of(model), 1 << 30)
    prompts = Prompts(model, [1, 700], [adapter] * 2)
    expected = prompts.by_layers()
    torch.testing.assert_close(prompts.decode(stepping), expected, atol=1e-3, rtol=5e-4)


@pytest.mark.parametrize("rank", [1, 3, 64])
def test_ranks_of_any_size(rank: int, tmp_path: Path) -> None:
    model, stepping = step_of("llama")
    adapter = make(tmp_path, "lora", stepping, r=rank, lora_alpha=3)
    prompts = Prompts(model, [9, 30], [adapter, NO_ADAPTER])
    torch.testing.assert_close(prompts.decode(stepping), prompts.by_layers(), atol=1e-3, rtol=5e-4)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}])
def test_other_loras_run_through_the_layers(settings: dict[str, Any], tmp_path: Path) -> None:
    """And nothing else does: rows beside them are computed by the step."""
    model, stepping = step_of("llama")
    adapter = make(tmp_path, "lora", stepping, **settings)
    assert not stepping.steps(adapter)
    prompts = Prompts(model, [9, 30], [adapter] * 2)
    assert torch.equal(prompts.decode(adapter.replacement), prompts.decode(prompts.layers_of(0)))


class Wrong(Adapter):
    """Adds to the input of layer 0, and tells the step of half as much."""

    def shift(self, layer: int) -> torch.Tensor | None:
        return torch.full((64,), 0.5) if layer == 0 else None

    def step_terms(self) -> StepTerms:
        return StepTerms(shifts={0: torch.full((64,), 0.25)})


class Unknown(Wrong):
    """The step does not know this kind."""

    def step_terms(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("kind", [Wrong, Unknown])
def test_what_the_step_computes_otherwise_is_left_to_the_layers(
    kind: type[Adapter], caplog: pytest.LogCaptureFixture
) -> None:
    model, stepping = step_of("llama")
    adapter = kind("odd", "1")
    with caplog.at_level(logging.INFO, logger="gemserve.model"):
        assert not stepping.steps(adapter)
    assert "adapter 'odd' decodes layer by layer" in caplog.text
    prompts = Prompts(model, [20, 30], [NO_ADAPTER, adapter])
    assert torch.equal(prompts.decode(stepping), prompts.decode(model))


def test_the_engine_mixes_all_rows(tmp_path: Path) -> None:
    """Rows that the step does not take must not run on the base model's layers, nor the others."""
    model, _ = step_of("llama")
    core = core_over(model, NoText(), CONFIG, eos_ids=frozenset())
    some: list[Adapter | None] = [
        make(tmp_path, kind, model, seed) for kind in KINDS for seed in (0, 1)
    ]
    dora = make(tmp_path, "lora", model, use_dora=True)
    rows = [None, *some, dora, None, Unknown("odd", "1"), *some[6:]]
    requests = [request(prompt(20 + 7 * i, i), adapter) for i, adapter in enumerate(rows)]
    alone = [run(core, [one])[0] for one in requests]
    assert run(core, requests) == alone
    layers = core_over(model, NoText(), replace(CONFIG, cpu_step="off"), eos_ids=frozenset())
    assert run(layers, requests) == alone


def test_an_adapter_is_tried_once_and_forgotten_with_its_last_use(tmp_path: Path) -> None:
    """What the step keeps of an adapter must not keep the adapter in memory."""
    _, stepping = step_of("llama")
    adapter = make(tmp_path, "lora", stepping)
    step: Any = stepping._step
    assert len(step._known) == 2
    assert stepping.steps(adapter)
    del adapter
    gc.collect()
    assert len(step._known) == 1


def test_a_lora_takes_no_memory_twice(tmp_path: Path) -> None:
    """The step reads PEFT's own tensors: their memory is what the adapter's limit counts."""
    _, stepping = step_of("llama")
    adapter = make(tmp_path, "lora", stepping)
    step: Any = stepping._step
    kept = {t.data_ptr() for t in step._known[adapter]._kept if isinstance(t, torch.Tensor)}
    own = {p.data_ptr() for p in adapter.replacement.hf.parameters()}
    assert kept <= own


def test_the_settings_of_a_lora_are_those_of_peft(tmp_path: Path) -> None:
    """Ranks and scales differ by module."""
    model, stepping = step_of("llama")
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 20}, "use_rslora": True}
    adapter = make(tmp_path, "lora", stepping, **patterns)
    assert json.loads((next(tmp_path.iterdir()) / "adapter_config.json").read_text())["use_rslora"]
    assert stepping.steps(adapter)
    prompts = Prompts(model, [9], [adapter])
    torch.testing.assert_close(prompts.decode(stepping), prompts.by_layers(), atol=1e-3, rtol=5e-4)
